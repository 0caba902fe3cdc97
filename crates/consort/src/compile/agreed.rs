//! Agreement of the ranks on a program that each of them traced.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use consort_ir::index::Sym;
use consort_ir::joint::Script;

use super::Compiled;
use super::agree::{MISS, Meeting};
use super::guards::Pattern;
use super::roles::{Part, Verdict};
use super::traced::Traced;
use crate::error::{Error, Result};
use crate::flatten::Flatten;
use crate::trace::Peers;

impl<A: Flatten + 'static, R: Flatten + 'static> Compiled<A, R> {
    /// Agrees with the other ranks on the program that was traced, and traces it again if only peers given by numbers
    /// differ. Returns it, and the number of the agreement of ranks with roles. A failed trace is reported to the others.
    pub(super) fn agree_on_program(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        pattern: &mut Pattern,
        mut traced: Result<Traced<R>>,
    ) -> Result<(Traced<R>, u64)> {
        if self.options.role.is_some() {
            return self.agree_in_roles(args, meeting, pattern, traced);
        }
        let what = "its program";
        let outcome = (|| {
            if meeting.is_same(what, text_of(&traced))? {
                return Ok(());
            }
            let numbers = traced.as_ref().map_or(&[][..], |traced| &traced.peers);
            let Some(peers) = meeting.peers(numbers)? else {
                return meeting.differ(what, text_of(&traced));
            };
            traced = self.trace_with(peers, args, meeting, pattern, &traced);
            meeting.check_same(what, text_of(&traced))
        })();
        let traced = traced?;
        outcome.map(|()| (traced, MISS))
    }

    /// The same for ranks with roles: their communication is checked together.
    fn agree_in_roles(
        &self,
        args: &A,
        meeting: &Meeting<'_>,
        pattern: &mut Pattern,
        traced: Result<Traced<R>>,
    ) -> Result<(Traced<R>, u64)> {
        let values = pattern.bind(args, meeting.world).map(|bound| pattern.values(&bound));
        let values: BTreeMap<Sym, i64> = values.unwrap_or_default().into_iter().collect();
        let mut traced = traced;
        for is_last in [false, true] {
            let script = traced.as_ref().map_err(Error::clone);
            let script = script.and_then(|traced| self.script(traced, &values, meeting));
            let part = match (&traced, &script) {
                (Ok(traced), Ok(script)) => {
                    Ok(Part { text: &traced.text, peers: &traced.peers, script: script.clone() })
                }
                (_, Err(error)) | (Err(error), _) => Err(error),
            };
            let verdict = meeting.agree_on_roles(part.as_ref().map_err(|error| *error), is_last);
            let mut own = traced?;
            script?;
            match verdict? {
                Verdict::Fit { joint, communicates } => {
                    own.communicates = communicates;
                    let func = own.graphs.first().and_then(|graph| graph.func());
                    let symbols = func.map(Script::symbols).unwrap_or_default().into_iter();
                    pattern.fixed = symbols.filter_map(|sym| Some((sym, *values.get(&sym)?))).collect();
                    return Ok((own, joint));
                }
                Verdict::Retrace(None) => traced = Ok(own),
                Verdict::Retrace(Some(peers)) => {
                    traced = self.trace_with(peers, args, meeting, pattern, &Ok(own));
                }
            }
        }
        Err(Error::new("compile", "the roles found no agreement, which is a defect of consort", meeting.site))
    }

    /// Traces the function again, with the peers that its ranks name by different numbers.
    fn trace_with(
        &self,
        peers: Peers,
        args: &A,
        meeting: &Meeting<'_>,
        pattern: &mut Pattern,
        before: &Result<Traced<R>>,
    ) -> Result<Traced<R>> {
        let graphs = before.iter().flat_map(|traced| &traced.graphs);
        graphs.for_each(|graph| self.graphs.borrow_mut().forget(graph));
        pattern.peers = Some(Rc::new(peers));
        self.trace(args, meeting, pattern, &Cell::new(false), meeting.site)
    }

    /// What the program starts and waits for on this rank.
    fn script(
        &self,
        traced: &Traced<R>,
        values: &BTreeMap<Sym, i64>,
        meeting: &Meeting<'_>,
    ) -> Result<Script> {
        let graph = traced.graphs.first().and_then(|graph| Some((graph.decided.mesh(), graph.func()?)));
        let none = || Error::new("compile", "there is no program", meeting.site);
        let (mesh, func) = graph.ok_or_else(none)?;
        Script::of(mesh, func, meeting.world.rank, values).map_err(|failure| meeting.error(failure))
    }
}

fn text_of<R>(traced: &Result<Traced<R>>) -> Result<&str, &Error> {
    traced.as_ref().map(|traced| &traced.text[..])
}
