//! Loops compiled for each instruction set, with one chosen at run time.
//!
//! A loop is written once, as a [`Loop`] whose `run` is `#[inline(always)]`, in plain Rust that a compiler can
//! vectorise. `mul_add` is one instruction wherever there is a wide instruction set.

use std::sync::OnceLock;

use consort_types::Failure;

/// A computation compiled for each instruction set. Mark `run` and everything it calls `#[inline(always)]`.
pub trait Loop {
    /// The result.
    type Output;
    /// Computes.
    fn run(self) -> Self::Output;
}

/// An instruction set that loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// 512-bit vectors.
    Avx512,
    /// 256-bit vectors.
    Avx2,
    /// The baseline of the architecture: NEON on 64-bit ARM, SSE2 on x86-64.
    Baseline,
}

impl Isa {
    /// The instruction sets, the largest first.
    const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Baseline];

    /// Its name in `CONSORT_ISA` and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Baseline => "baseline",
        }
    }

    /// The instruction set of a machine that has `best`, where the environment asks for one.
    fn chosen(best: Isa, asked: Option<&str>) -> Result<Isa, Box<Failure>> {
        let has: Vec<Isa> = Isa::ALL.into_iter().skip_while(|isa| *isa != best).collect();
        let Some(asked) = asked.map(str::trim).filter(|asked| !asked.is_empty()) else { return Ok(best) };
        has.iter().copied().find(|isa| isa.name() == asked).ok_or_else(|| {
            let names: Vec<&str> = has.iter().map(|isa| isa.name()).collect();
            let expected = format!("an instruction set that this machine has: {}", names.join(", "));
            let failure = Failure::new((expected, format!("{asked:?}"))).of("CONSORT_ISA");
            failure.note("unset it to use the largest")
        })
    }

    /// That of this machine and this environment, read once.
    fn of_process() -> &'static Result<Isa, Box<Failure>> {
        static ISA: OnceLock<Result<Isa, Box<Failure>>> = OnceLock::new();
        let asked = || std::env::var_os("CONSORT_ISA").map(|asked| asked.to_string_lossy().into_owned());
        ISA.get_or_init(|| Isa::chosen(detect(), asked().as_deref()))
    }
}

/// The instruction set of this machine. `CONSORT_ISA` (`avx2`, `baseline`) selects a smaller one.
#[inline]
pub fn isa() -> Isa {
    match Isa::of_process() {
        Ok(isa) => *isa,
        Err(_) => Isa::Baseline,
    }
}

/// Fails if the environment asks for an instruction set that this machine does not have.
pub fn check_isa() -> Result<(), Box<Failure>> {
    Isa::of_process().as_ref().map(drop).map_err(Clone::clone)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma") && has!("f16c")) {
        return Isa::Baseline;
    }
    let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
    if wide { Isa::Avx512 } else { Isa::Avx2 }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Baseline
}

/// Runs a loop in the version for this machine.
#[inline]
pub fn vectorize<L: Loop>(work: L) -> L::Output {
    #[cfg(target_arch = "x86_64")]
    match isa() {
        // SAFETY: the machine has these instructions, or `detect` had not said so.
        Isa::Avx512 => return unsafe { avx512(work) },
        // SAFETY: as above.
        Isa::Avx2 => return unsafe { avx2(work) },
        Isa::Baseline => {}
    }
    work.run()
}

/// More bytes than a core's private caches hold.
const STREAM: usize = 4 << 20;

/// The same for a loop that does little per element, over `bytes` of operands and result. Memory bandwidth limits it,
/// and AMD's cores do better with short vectors: with 4 KiB pages an addition of 16 MiB takes 1.2 times as long with
/// 512 bits as with 128.
#[inline]
pub(crate) fn stream<L: Loop>(work: L, bytes: usize) -> L::Output {
    if bytes > STREAM && prefers_short_vectors() { work.run() } else { vectorize(work) }
}

fn prefers_short_vectors() -> bool {
    static PREFERS: OnceLock<bool> = OnceLock::new();
    *PREFERS.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            let vendor = std::arch::x86_64::__cpuid(0);
            [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
        }
        #[cfg(not(target_arch = "x86_64"))]
        false
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn avx512<L: Loop>(work: L) -> L::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<L: Loop>(work: L) -> L::Output {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Axpy<'a>(f32, &'a [f32], &'a mut [f32]);

    impl Loop for Axpy<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            for (y, x) in self.2.iter_mut().zip(self.1) {
                *y = x.mul_add(self.0, *y);
            }
        }
    }

    #[test]
    fn the_environment_chooses_an_instruction_set_that_the_machine_has() {
        let chosen = |best, asked| Isa::chosen(best, asked).map_err(|failure| failure.to_string());
        assert_eq!(chosen(Isa::Avx512, None), Ok(Isa::Avx512));
        assert_eq!(chosen(Isa::Avx512, Some(" avx2 ")), Ok(Isa::Avx2));
        assert_eq!(chosen(Isa::Avx2, Some("")), Ok(Isa::Avx2));
        assert_eq!(chosen(Isa::Avx2, Some("baseline")), Ok(Isa::Baseline));
        for (best, asked, has) in
            [(Isa::Avx2, "avx512", "avx2, baseline"), (Isa::Baseline, "sse", "baseline")]
        {
            let error = chosen(best, Some(asked)).unwrap_err();
            let wanted = format!(
                "CONSORT_ISA: expected an instruction set that this machine has: {has}, got {asked:?}"
            );
            assert!(error.starts_with(&wanted), "{error}");
        }
    }

    #[test]
    fn a_loop_gives_the_same_on_every_instruction_set() {
        let x: Vec<f32> = (0..1000).map(|i| i as f32 * 0.37).collect();
        let (mut here, mut plain) = (vec![1.5; 1000], vec![1.5; 1000]);
        vectorize(Axpy(0.1, &x, &mut here));
        Axpy(0.1, &x, &mut plain).run();
        assert_eq!(here, plain);
    }

    #[test]
    fn a_stream_gives_the_same_as_a_loop() {
        let x: Vec<f32> = (0..1000).map(|i| i as f32 * 0.37).collect();
        let (mut few, mut many) = (vec![1.5; 1000], vec![1.5; 1000]);
        stream(Axpy(0.1, &x, &mut few), STREAM);
        stream(Axpy(0.1, &x, &mut many), STREAM + 1);
        let plain: Vec<f32> = x.iter().map(|x| x.mul_add(0.1, 1.5)).collect();
        assert_eq!((&few, &many), (&plain, &plain));
    }
}
