//! Compares the errors of ranks with that of the oracle: the same op, line and message on the rank that failed, and
//! only consequences of it on the others.

use consort_ir::tensor::Tensor;

use crate::OracleError;

/// The results or the error of each rank.
pub type Outcomes = [Result<Vec<Tensor>, String>];

/// Checks that the errors of the ranks match that of the oracle.
pub fn same_error(expected: &OracleError, got: &Outcomes) -> Result<(), String> {
    let OracleError::Op { rank, op, loc, message, .. } = expected else {
        return Err(format!("expected an op to fail, got {expected}"));
    };
    let rank = rank.0 as usize;
    let said = |rank: usize| got.get(rank).and_then(|got| got.as_ref().err()).map(String::as_str);
    let differs = |wanted: &str| Err(format!("rank {rank}: expected {wanted:?}, got {:?}", said(rank)));
    let Some(name) = op.strip_suffix("_start") else {
        // A local op: the exact message, with the user's line.
        let at = loc.as_ref().map_or(String::new(), |loc| format!("\n  at {loc}"));
        let wanted = format!("{op}: {message}{at}");
        if said(rank) != Some(&wanted) {
            return differs(&wanted);
        }
        return others_follow(got, rank, op);
    };
    if let Some((n, peer)) = between(message, "expected a peer in 0..", ", or -1 for none, got ") {
        let wanted = format!("{name}: expected a peer below {n}, got {peer}");
        return if said(rank) == Some(&wanted) { others_follow(got, rank, op) } else { differs(&wanted) };
    }
    // Two ends that do not match: the receiver reports it, and names both.
    let words: Vec<&str> = message.split(' ').collect();
    let ["rank", from, "sends", _, "to", "rank", to, rest @ ..] = &words[..] else {
        return Err(format!("no rule for what ranks say of {message:?}"));
    };
    let to = to.trim_end_matches(',');
    let (what, sends, expects) = match rest {
        ["with", "tag", tag, ..] => {
            let tag = tag.trim_end_matches(',');
            let ends = [format!("\n  rank {from}   send "), format!("\n  rank {to}   receive ")];
            ("a message must have the type and shape that its receiver expects", ends, format!(", tag {tag}"))
        }
        _ => {
            let ends = [format!("\n  rank {from}   all_to_all["), format!("\n  rank {to}   all_to_all[")];
            ("splits must fit together", ends, format!(" of rank {from} "))
        }
    };
    let receiver = to.parse().ok().and_then(said).unwrap_or("");
    let first = receiver.lines().next().unwrap_or("");
    // The start reports it if the sender came first, else the wait.
    let first = first.strip_prefix("wait: ").unwrap_or(first);
    let named = first.starts_with(&format!("{name}: ")) && first.ends_with(what);
    if !named || !sends.iter().all(|end| receiver.contains(end)) || !receiver.contains(&expects) {
        return Err(format!("rank {to}: expected {name}: {what}: {sends:?}{expects}, got {receiver:?}"));
    }
    Ok(())
}

/// The two words of a message: between `first` and `second`, and after `second`.
fn between<'a>(message: &'a str, first: &str, second: &str) -> Option<(&'a str, &'a str)> {
    message.strip_prefix(first)?.split_once(second)
}

/// The other ranks may fail in the same op, by their own values or because this one has left; or not at all.
fn others_follow(got: &Outcomes, rank: usize, op: &str) -> Result<(), String> {
    for (other, got) in got.iter().enumerate().filter(|(other, _)| *other != rank) {
        let Err(error) = got else { continue };
        let left = format!("rank {rank} has left the group without its part of it");
        let stopped = format!("rank {rank} stopped: {op}: ").replace("_start: ", ": ");
        let first = error.lines().next().unwrap_or("");
        if !error.starts_with(&format!("{op}: ")) && !first.ends_with(&left) && !first.contains(&stopped) {
            return Err(format!("rank {other}: expected what follows from rank {rank}, got {error:?}"));
        }
    }
    Ok(())
}
