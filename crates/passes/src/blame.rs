//! Errors for which a user's op is to blame, and not consort: a line of that op, or the wait for a start of it.

use consort_ir::diagnostic::{Diagnostic, Position};
use consort_ir::ops::{Effects, built_in};
use consort_ir::program::{Block, Func, Node};
use consort_types::Failure;

/// The error as one of a user's op, if its line is to blame.
pub(crate) fn of_user_op(funcs: &[Func], error: &Diagnostic) -> Option<Box<Failure>> {
    let Position::Node(func, line) = error.at else { return None };
    let nodes = lines(&funcs.get(func)?.body);
    let node = nodes.get(line).copied().flatten()?;
    let start = |node: &&Node| node.op.effects().starts().is_some();
    let node = match node.op.effects() {
        Effects::Wait => {
            let gives = |start: &&Node| node.args.iter().any(|arg| start.results.contains(arg));
            nodes.into_iter().flatten().filter(start).find(gives)?
        }
        _ => node,
    };
    let name = node.op.info().name;
    // An error at a built-in op is a defect of consort.
    if built_in(name).is_some() {
        return None;
    }
    let failure = Failure { op: name.into(), ..*error.failure.clone() };
    Some(
        Box::new(failure).note(format!("`{name}` is not built in; its rules must not contradict each other")),
    )
}

/// The nodes of a block in the order in which they are printed; `None` for the end of a block.
fn lines(block: &Block) -> Vec<Option<&Node>> {
    let mut all = Vec::new();
    for node in &block.nodes {
        all.push(Some(node));
        all.extend(node.blocks.iter().flat_map(lines));
    }
    all.push(None);
    all
}

#[cfg(test)]
mod tests {
    use consort_ir::op;
    use consort_ir::ops::{Cost, CostCx, InferCx, OpDef, OpInfo, OpTable};
    use consort_ir::program::Program;
    use consort_ir::text::parse;
    use consort_ir::types::Type;
    use consort_ir::verify::hazards;
    use consort_types::{Collective, GroupName, Kind, Reduce};

    use super::*;
    use crate::{CompileError, PassCx, PassError, compile};

    op! {
        /// Takes only what differs between ranks.
        pub struct Picky("picky")(x) {}
        example ""
    }

    impl OpDef for Picky {
        fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
            let x = cx.tensor(0)?;
            match x.varies.is_empty() {
                true => Err(Failure::new(("what differs between ranks", ""))),
                false => Ok(vec![x.clone().into()]),
            }
        }
        fn cost(&self, cx: &CostCx<'_>) -> Cost {
            cx.free()
        }
    }

    op! {
        /// A sum.
        pub struct TotalStart("total_start")(x) {
            /// The group.
            over: GroupName
        }
        example ""
    }

    impl OpDef for TotalStart {
        fn infer(&self, cx: &mut InferCx<'_>) -> Result<Vec<Type>, Box<Failure>> {
            Ok(vec![Type::Pending(vec![cx.tensor(0)?.clone()])])
        }
        fn cost(&self, cx: &CostCx<'_>) -> Cost {
            cx.free()
        }
        fn collective(&self) -> Option<Collective<'_, consort_ir::index::Index>> {
            Some(Collective { reduce: Some(Reduce::Sum), ..Collective::new(Kind::AllReduce, self.over) })
        }
    }

    fn read(text: &str) -> Program {
        static OPS: [OpInfo; 2] = [Picky::INFO, TotalStart::INFO];
        let mut ops = OpTable::built_in();
        assert!(OPS.iter().all(|info| ops.add(info)));
        parse(text, &ops).unwrap().program
    }

    #[test]
    fn a_user_op_that_refuses_what_a_pass_may_do_is_named() {
        let program = read(
            "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{tp}) -> f32[2]{tp} {\n    \
             v1 = constant[dtype=bool, shape=[2], value=1] : bool[2]\n    \
             v2 = constant[dtype=f32, shape=[2], value=1.0] : f32[2]\n    \
             v3 = select v1, v2, v0 : f32[2]{tp}\n    v4 = picky v3 : f32[2]{tp}\n    return v4\n}\n",
        );
        let error = compile(&program, &mut PassCx::default()).unwrap_err();
        assert!(matches!(error, CompileError::Pass(PassError::UserOp(_))) && !error.is_defect(), "{error:?}");
        let said = "picky: expected what differs between ranks\n  \
                    note: `picky` is not built in; its rules must not contradict each other";
        assert_eq!(error.to_string(), said);
    }

    #[test]
    fn at_a_wait_the_start_is_to_blame() {
        let plan = |start: &str| {
            read(&format!(
                "mesh (tp: 2)\n\nfunc @f(v0: f32[2]{{tp}} @arg0+0x0) -> f32[2]{{tp}}\n\
                 plan (rank 0, arg0: 0x8, heap: 0x40, out0: 0x8) {{\n    \
                 v1 = neg v0 : f32[2]{{tp}} @heap+0x0\n    \
                 v2 = {start} v1 : pending<f32[2]{{tp}}> @heap+0x0 reuse v1 queue tp #0 lease v1\n    \
                 v3 = wait v2 : f32[2]{{tp}} @heap+0x20\n    return v3\n}}\n"
            ))
        };
        let [own, built_in] = ["total_start[over=tp]", "all_reduce_start[reduce=sum, over=tp]"].map(plan);
        let named = |program: &Program| {
            let errors = hazards(&program.mesh, &program.funcs[0]);
            let at_wait = errors.iter().find(|error| error.failure.op == "wait").unwrap();
            of_user_op(&program.funcs, at_wait).map(|failure| failure.op.into_owned())
        };
        assert_eq!((named(&own), named(&built_in)), (Some("total_start".to_string()), None));
    }
}
