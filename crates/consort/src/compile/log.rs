//! The log of compilations by topic, as the environment asks for it.

use std::sync::OnceLock;

use consort_types::Failure;

use crate::world::World;

/// The topics of the log.
const TOPICS: [&str; 5] = ["program", "guards", "breaks", "recompiles", "plan"];

/// What to log, and of which rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Wanted {
    topics: Vec<&'static str>,
    /// `None` for all ranks.
    rank: Option<u32>,
}

impl Wanted {
    /// What an environment asks for, given how to look up a variable in it.
    fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Wanted, Box<Failure>> {
        let mut topics = Vec::new();
        let list = lookup("CONSORT_LOG").unwrap_or_default();
        for topic in list.split(',').map(str::trim).filter(|topic| !topic.is_empty()) {
            match TOPICS.iter().find(|known| **known == topic) {
                _ if topic == "all" => topics.extend(TOPICS),
                Some(known) => topics.push(*known),
                None => {
                    let expected = format!("topics out of {}, all", TOPICS.join(", "));
                    let failure = Failure::new((expected, format!("{topic:?}"))).of("CONSORT_LOG");
                    return Err(failure.note("separate topics by commas, or unset it to log nothing"));
                }
            }
        }
        let rank = match lookup("CONSORT_LOG_RANK").as_deref().map(str::trim) {
            Some("all") => None,
            None => Some(0),
            Some(rank) => Some(rank.parse().map_err(|_| {
                let failure = Failure::new(("a rank, or `all`", format!("{rank:?}"))).of("CONSORT_LOG_RANK");
                failure.note("unset it to log what rank 0 does")
            })?),
        };
        Ok(Wanted { topics, rank })
    }

    /// What the environment of this process asks for, read once.
    fn of_process() -> &'static Result<Wanted, Box<Failure>> {
        static WANTED: OnceLock<Result<Wanted, Box<Failure>>> = OnceLock::new();
        let lookup = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        WANTED.get_or_init(|| Wanted::read(lookup))
    }
}

/// Fails if the environment asks for a log that does not exist.
pub(crate) fn check_log() -> Result<(), Box<Failure>> {
    Wanted::of_process().as_ref().map(drop).map_err(Clone::clone)
}

/// Writes to the standard error what `CONSORT_LOG` asks for: topics with commas between them. `CONSORT_LOG_RANK` says
/// whose: a rank, or `all`; rank 0 otherwise.
pub(crate) fn log(topic: &str, text: impl FnOnce() -> String) {
    let Ok(wanted) = Wanted::of_process() else { return };
    if !wanted.topics.contains(&topic) {
        return;
    }
    let rank = World::current().map_or(0, |world| world.rank.0);
    if wanted.rank.is_none_or(|wanted| wanted == rank) {
        // `consort run` puts the rank before each line itself.
        let who =
            if std::env::var_os("CONSORT_RANK").is_some() { String::new() } else { format!("[{rank}] ") };
        text().lines().for_each(|line| eprintln!("{who}{topic}: {line}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(topics: &str, rank: Option<&str>) -> Result<Wanted, String> {
        let lookup = |name: &str| match name {
            "CONSORT_LOG" => Some(topics.to_string()),
            _ => rank.map(str::to_string),
        };
        Wanted::read(lookup).map_err(|failure| failure.to_string())
    }

    #[test]
    fn topics_and_ranks_are_read_and_others_refused() {
        let wanted = |topics: &[&'static str], rank| Ok(Wanted { topics: topics.to_vec(), rank });
        assert_eq!(read("", None), wanted(&[], Some(0)));
        assert_eq!(read(" plan, breaks ,", Some("all")), wanted(&["plan", "breaks"], None));
        assert_eq!(read("all", Some("3")), wanted(&TOPICS, Some(3)));
        let error = read("plan,foo", None).unwrap_err();
        let known = "topics out of program, guards, breaks, recompiles, plan, all";
        assert!(error.starts_with(&format!("CONSORT_LOG: expected {known}, got \"foo\"\n")), "{error}");
        let error = read("plan", Some("-1")).unwrap_err();
        assert!(error.starts_with("CONSORT_LOG_RANK: expected a rank, or `all`, got \"-1\"\n"), "{error}");
    }
}
