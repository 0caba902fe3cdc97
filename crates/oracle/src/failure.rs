//! Compares the errors of ranks with that of the oracle: the same op, line and message on the rank that failed, and
//! only consequences of it on the others.

use consort_ir::literal::Literal;
use consort_ir::ops::Unmatched;

use crate::OracleError;

/// The results or the error of each rank.
pub type Outcomes = [Result<Vec<Literal>, String>];

/// Checks that the errors of the ranks match that of the oracle.
pub fn same_error(expected: &OracleError, got: &Outcomes) -> Result<(), String> {
    let OracleError::Op { rank, op, site, error, .. } = expected else {
        return Err(format!("expected an op to fail, got {expected}"));
    };
    let rank = rank.0 as usize;
    let said = |rank: usize| got.get(rank).and_then(|got| got.as_ref().err()).map(String::as_str);
    let differs = |wanted: &str| Err(format!("rank {rank}: expected {wanted:?}, got {:?}", said(rank)));
    let Some(name) = op.strip_suffix("_start") else {
        // A local op: the exact message, with the user's line. A kernel may add rows with what this rank has.
        let at = site.as_ref().map_or(String::new(), |site| format!("\n  at {site}"));
        let wanted = format!("{op}: {error}");
        let rows = said(rank).and_then(|said| said.strip_prefix(&wanted)?.strip_suffix(&at));
        let own = format!("\n  rank {rank} has ");
        return match rows.is_some_and(|rows| rows.is_empty() || rows.starts_with(&own)) {
            true => others_follow(got, rank, op),
            false => differs(&format!("{wanted}{at}")),
        };
    };
    // Two ends that do not match: the receiver is told, and both are named.
    let (from, to, what, sends, expects) = match error.unmatched {
        None => return Err(format!("no rule for what ranks say of {error}")),
        Some(Unmatched::Peer { .. }) => {
            let wanted = error.failure().of(name.to_string()).to_string();
            return if said(rank) == Some(&wanted) { others_follow(got, rank, op) } else { differs(&wanted) };
        }
        Some(Unmatched::Message { from, to, tag }) => {
            let ends = [format!("\n  {from}   send "), format!("\n  {to}   receive ")];
            let what = "a message must have the type and shape that its receiver expects";
            (from, to, what, ends, format!(", tag {tag}"))
        }
        Some(Unmatched::Part { from, to }) => {
            let ends = [format!("\n  {from}   all_to_all["), format!("\n  {to}   all_to_all[")];
            (from, to, "splits must fit together", ends, format!(" of {from} "))
        }
    };
    // Either end may find it; the other then repeats what that end said, indented.
    let receiver = said(to.0 as usize).unwrap_or("").replace("\n    ", "\n  ");
    let first = receiver.lines().next().unwrap_or("");
    // The start reports it if the sender came first, else the wait.
    let first = first.strip_prefix("wait: ").unwrap_or(first);
    let first = first.strip_prefix(&format!("{from} stopped: ")).unwrap_or(first);
    let named = first.starts_with(&format!("{name}: ")) && first.ends_with(what);
    if !named || !sends.iter().all(|end| receiver.contains(end)) || !receiver.contains(&expects) {
        return Err(format!("{to}: expected {name}: {what}: {sends:?}{expects}, got {receiver:?}"));
    }
    Ok(())
}

/// The other ranks may fail in the same op, by their own values or because this one has left; or not at all.
fn others_follow(got: &Outcomes, rank: usize, op: &str) -> Result<(), String> {
    for (other, got) in got.iter().enumerate().filter(|(other, _)| *other != rank) {
        let Err(error) = got else { continue };
        let left = format!("rank {rank} left the group before it had done its part of this call");
        let stopped = format!("rank {rank} stopped: {op}: ").replace("_start: ", ": ");
        let first = error.lines().next().unwrap_or("");
        if !error.starts_with(&format!("{op}: ")) && !first.ends_with(&left) && !first.contains(&stopped) {
            return Err(format!("rank {other}: expected what follows from rank {rank}, got {error:?}"));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]
mod tests {
    use super::*;
    use consort_ir::ops::OpTable;
    use consort_ir::text::{parse, run_lines};
    use consort_types::Rank;

    /// What the oracle finds unmatched in each failing run line of a case.
    fn unmatched(text: &str) -> Vec<Option<Unmatched>> {
        let program = parse(text, &OpTable::built_in()).unwrap().program;
        let outcome = |line: &consort_ir::text::RunLine| match crate::run(
            &program,
            &line.func,
            &line.inputs(&program).unwrap(),
        ) {
            Err(OracleError::Op { error, .. }) => Some(error.unmatched),
            _ => None,
        };
        run_lines(text).unwrap().iter().filter_map(outcome).collect()
    }

    #[test]
    fn either_end_may_find_that_they_do_not_match() {
        let text =
            include_str!("../../../filetests/collectives/all_to_all-with-splits-read-from-tensors.csr");
        let program = parse(text, &OpTable::built_in()).unwrap().program;
        let line = &run_lines(text).unwrap()[3];
        let error = crate::run(&program, &line.func, &line.inputs(&program).unwrap()).unwrap_err();
        let rows = "\n  rank 1   all_to_all[..]: sends 8 bytes to rank 0\n  rank 0   all_to_all[..]: expects 16 bytes of rank 1 ";
        let own = |of: &str| format!("all_to_all: call 0: {of}{rows}");
        let told =
            |rank: usize, of: &str| consort_types::Failure::elsewhere(rank, own(of)).of("wait").to_string();
        let (right, other) = ("splits must fit together", "expected f32, got f64");
        let verdict = |zero: String, one: String| same_error(&error, &[Err(zero), Err(one)]);
        assert_eq!(verdict(own(right), told(0, right)), Ok(()));
        assert_eq!(verdict(told(1, right), own(right)), Ok(()));
        assert!(verdict(told(1, other), own(other)).is_err());
        assert!(verdict("wait: rank 1 stopped".into(), own(right)).is_err());
    }

    #[test]
    fn the_verdict_says_which_ranks_do_not_match() {
        let (from, to) = (Rank(1), Rank(0));
        let messages = unmatched(include_str!(
            "../../../filetests/p2p/exchange-shape-mismatch-is-found-as-messages-meet.csr"
        ));
        assert_eq!(messages, [4, 0].map(|tag| Some(Unmatched::Message { from, to, tag })));
        let splits = unmatched(include_str!(
            "../../../filetests/collectives/all_to_all-with-splits-read-from-tensors.csr"
        ));
        assert_eq!(splits, [None, Some(Unmatched::Part { from, to }), None]);
        let peers = unmatched(include_str!("../../../filetests/p2p/exchange-peer-outside-the-group.csr"));
        assert_eq!(peers, [Some(Unmatched::Peer { peer: 5, size: 2 })]);
    }
}
