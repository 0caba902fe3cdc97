//! What names a job on this host: the name of its socket, and the secret that admits a rank.
//!
//! The name may be seen by anyone on the host. The secret may not: it travels in the environment, which only
//! the same user can read, never in arguments, and no error or `Debug` prints it.

use std::fmt;
use std::hint::black_box;
use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// How to reach a job's coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The name of the job; its socket is the abstract one of this name after `consort-`.
    pub name: String,
    /// The secret that admits a rank.
    pub secret: Secret,
}

impl Job {
    /// A job with a random name and a random secret.
    pub fn random() -> io::Result<Job> {
        let mut name = [0; 8];
        let mut secret = [0; 16];
        fill(&mut name)?;
        fill(&mut secret)?;
        Ok(Job { name: hex(&name), secret: Secret(secret) })
    }

    /// The name of the socket in the abstract namespace: nothing of it is in the file system.
    pub(crate) fn socket(&self) -> String {
        format!("consort-{}", self.name)
    }

    /// Whether a name is valid for a job: short enough for a socket, and plain.
    pub(crate) fn is_name(name: &str) -> bool {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        (1..=64).contains(&name.len()) && name.bytes().all(plain)
    }
}

/// 128 random bits that only the ranks of a job know.
#[derive(Clone)]
pub struct Secret([u8; 16]);

impl Secret {
    /// The secret of 32 hexadecimal digits.
    pub(crate) fn from_hex(text: &str) -> Option<Secret> {
        let digits: Option<Vec<u8>> =
            text.chars().map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
        let digits: [u8; 32] = digits?.try_into().ok()?;
        Some(Secret(std::array::from_fn(|i| digits[2 * i] << 4 | digits[2 * i + 1])))
    }

    /// The digits, for the environment of a rank.
    pub(crate) fn to_hex(&self) -> String {
        hex(&self.0)
    }

    pub(crate) fn bytes(&self) -> [u8; 16] {
        self.0
    }

    /// Whether these bytes are the secret. The time taken does not depend on how many of them are right.
    pub(crate) fn is(&self, bytes: &[u8; 16]) -> bool {
        let differing = self.0.iter().zip(bytes).fold(0, |differing, (a, b)| black_box(differing | (a ^ b)));
        black_box(differing) == 0
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.is(&other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = match getrandom(&mut *bytes, GetRandomFlags::empty()) {
            Err(rustix::io::Errno::INTR) => 0,
            other => other?,
        };
        bytes = &mut bytes[n..];
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_back_from_its_digits_and_is_never_shown() {
        let secret = Secret::from_hex("000102030405060708090a0b0c0d0eFF").unwrap();
        assert_eq!(secret.bytes(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(secret.to_hex(), "000102030405060708090a0b0c0d0eff");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        for wrong in ["", "00", "g00102030405060708090a0b0c0d0eff", "000102030405060708090a0b0c0d0eff0"] {
            assert!(Secret::from_hex(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn every_byte_of_a_secret_counts() {
        let secret = Secret([7; 16]);
        assert!(secret.is(&[7; 16]));
        for i in 0..16 {
            let mut other = [7; 16];
            other[i] ^= 0x80;
            assert!(!secret.is(&other), "byte {i}");
        }
    }

    #[test]
    fn two_jobs_differ() {
        let (a, b) = (Job::random().unwrap(), Job::random().unwrap());
        assert!(a.name != b.name && a.secret != b.secret);
        assert!(Job::is_name(&a.name) && !Job::is_name("") && !Job::is_name("a/b"));
    }
}
