//! FNV-1a, for digests that need no collision resistance. Not for untrusted input.

/// A digest of words and bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Adds a word.
    #[inline(always)]
    pub fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    }

    /// Adds each word.
    pub fn add_all(&mut self, words: impl IntoIterator<Item = u64>) {
        words.into_iter().for_each(|word| self.add(word));
    }

    /// Adds each byte.
    pub fn add_bytes(&mut self, bytes: &[u8]) {
        self.add_all(bytes.iter().map(|byte| u64::from(*byte)));
    }

    /// The digest of bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut digest = Digest::default();
        digest.add_bytes(bytes);
        digest.get()
    }

    /// The digest of many bytes, eight at a time; each step mixes the state, so that a difference anywhere changes it. It
    /// is not that of [`Digest::of`].
    pub fn of_many(bytes: &[u8]) -> u64 {
        let mix = |hash: u64, number: u64| {
            let hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^ (hash >> 29)
        };
        let (whole, rest) = bytes.as_chunks::<8>();
        let hash = whole.iter().fold(bytes.len() as u64, |hash, chunk| mix(hash, u64::from_le_bytes(*chunk)));
        mix(hash, rest.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// The digest so far.
    #[inline(always)]
    pub fn get(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn known_digests() {
        // From the tables of the algorithm's authors.
        assert_eq!(Digest::of(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(Digest::of(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(Digest::of(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn every_byte_counts_in_a_digest_of_many() {
        // Computed by a script of its own.
        assert_eq!(Digest::of_many(&[]), 0);
        assert_eq!(Digest::of_many(&[1, 2, 3]), 1769602743430480034);
        let bytes: Vec<u8> = (0..29).collect();
        let mut seen = vec![Digest::of_many(&bytes), Digest::of_many(&bytes[1..])];
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x80;
            seen.push(Digest::of_many(&other));
        }
        seen.sort_unstable();
        assert!(seen.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
