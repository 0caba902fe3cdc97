//! How many cores the ranks of a host have together. A rank that is bound to one core has only that one: all masks
//! together show whether each rank has a core to spin on.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Cores for the ranks of a world.
#[derive(Clone, Copy)]
pub(crate) struct Cores {
    ranks: usize,
    cores: usize,
}

/// The cores that this process may use, a bit for each.
pub(crate) fn mine() -> Vec<u8> {
    // If the system does not say, assume one core.
    let Ok(set) = sched_getaffinity(None) else { return vec![1] };
    let bits =
        |byte: usize| (0..8).filter(|bit| set.is_set(byte * 8 + bit)).fold(0, |bits, bit| bits | 1 << bit);
    (0..CpuSet::MAX_CPU / 8).map(bits).collect()
}

impl Cores {
    /// The cores of `ranks` ranks, from the masks of the cores that they may use.
    pub(crate) fn of<'a>(ranks: usize, masks: impl IntoIterator<Item = &'a [u8]>) -> Cores {
        let mut all = [0u8; CpuSet::MAX_CPU / 8];
        for mask in masks {
            all.iter_mut().zip(mask).for_each(|(all, mask)| *all |= mask);
        }
        Cores { ranks, cores: all.iter().map(|bits| bits.count_ones() as usize).sum() }
    }

    /// Whether each rank has a core of its own, so that waiting may spin.
    pub(crate) fn one_each(self) -> bool {
        self.cores >= self.ranks
    }

    /// Whether each rank has a second core, for a helper thread.
    pub(crate) fn two_each(self) -> bool {
        self.cores >= 2 * self.ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_ranks_have_their_cores_together() {
        let [a, b]: [&[u8]; 2] = [&[0b1], &[0b10]];
        assert!(Cores::of(2, [a, b]).one_each() && !Cores::of(2, [a, b]).two_each());
        assert!(!Cores::of(2, [a, a]).one_each(), "both on one core");
        assert!(Cores::of(1, [&[0b11][..]]).two_each());
        let here: u32 = mine().iter().map(|bits| bits.count_ones()).sum();
        assert!(here >= 1);
    }
}
