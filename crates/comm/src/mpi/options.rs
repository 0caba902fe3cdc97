//! What the environment says of the engine over MPI. All ranks must say the same, which `init` checks: a call that only some
//! ranks compare, or that each cuts in another way, would never end.

use consort_types::Failure;

use crate::CommError;

/// The most bytes that are passed to one call of MPI, whose counts have 31 bits.
const MOST: usize = 1 << 30;
const CHECK_NAME: &str = "CONSORT_CHECK";
const MOST_NAME: &str = "CONSORT_MPI_MOST";

/// What the environment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Whether members compare their calls before their data move.
    pub(super) is_checked: bool,
    /// The most bytes that are passed to one call of MPI. A multiple of every element.
    pub(super) most: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { is_checked: cfg!(debug_assertions), most: MOST }
    }
}

impl Options {
    /// Those of this process.
    pub(super) fn from_env() -> Result<Options, CommError> {
        Options::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Options, CommError> {
        let mut options = Options::default();
        if let Some(value) = lookup(CHECK_NAME).filter(|value| !value.is_empty()) {
            options.is_checked = read_check(&value)?;
        }
        if let Some(value) = lookup(MOST_NAME).filter(|value| !value.is_empty()) {
            options.most = read_most(&value)?;
        }
        Ok(options)
    }

    /// What must be the same on all ranks.
    pub(crate) fn settings(self) -> [(&'static str, String); 2] {
        let checked = if self.is_checked { "on" } else { "off" };
        [
            ("compared calls (CONSORT_CHECK)", checked.to_string()),
            ("bytes of one call of MPI (CONSORT_MPI_MOST)", self.most.to_string()),
        ]
    }
}

fn read_check(value: &str) -> Result<bool, CommError> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => {
            let failure = Failure::new(("0 or 1", format!("{value:?}"))).of(CHECK_NAME);
            Err(CommError::Argument(failure.note("unset it: debug builds compare calls, others do not")))
        }
    }
}

fn read_most(value: &str) -> Result<usize, CommError> {
    let most = value.parse().ok().filter(|most: &usize| (8..=MOST).contains(most) && most.is_multiple_of(8));
    most.ok_or_else(|| {
        let expected = format!("a multiple of 8 from 8 to {MOST}");
        let failure = Failure::new((expected, format!("{value:?}"))).of(MOST_NAME);
        CommError::Argument(failure.note("unset it: larger operands are cut, which changes no result"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, value: &str) -> Result<Options, CommError> {
        Options::read(|asked| (asked == name).then(|| value.to_string()))
    }

    #[test]
    fn calls_are_compared_in_debug_builds_or_as_the_variable_says() {
        assert_eq!(read("", "").unwrap().is_checked, cfg!(debug_assertions));
        for (value, is_checked) in [("1", true), ("0", false), ("", cfg!(debug_assertions))] {
            assert_eq!(read(CHECK_NAME, value).unwrap().is_checked, is_checked, "{value:?}");
        }
        for wrong in ["x", "2", "on", " 1"] {
            let error = read(CHECK_NAME, wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("CONSORT_CHECK: expected 0 or 1, got {wrong:?}")), "{error}");
        }
    }

    #[test]
    fn the_bytes_of_a_call_fit_every_element_and_a_count() {
        assert_eq!(read("", "").unwrap().most, 1 << 30);
        assert_eq!(read(MOST_NAME, "1000").unwrap().most, 1000);
        for wrong in ["0", "12", "-8", "8k", "1073741832"] {
            let error = read(MOST_NAME, wrong).unwrap_err().to_string();
            assert!(
                error.contains("a multiple of 8 from 8 to 1073741824") && error.contains(wrong),
                "{error}"
            );
        }
    }
}
