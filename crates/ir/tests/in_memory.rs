//! Programs that no text can hold, because the parser looks names up: passes could still build them wrong, and
//! the verifier must say so.
#![allow(clippy::unwrap_used, reason = "in a test, what cannot be had is a failure")]

use consort_ir::diagnostic::Diagnostic;
use consort_ir::entity::Value;
use consort_ir::index::{Index, Sym};
use consort_ir::ops::{AllReduceStart, Op, OpTable};
use consort_ir::program::Program;
use consort_ir::text::parse;
use consort_ir::types::Type;
use consort_ir::verify::verify;
use consort_types::{Axes, Axis, Failure, GroupId, GroupName, Reduce};

const TEXT: &str = "mesh (tp: 2)

func @f(v0: f32[2]{tp}) -> f32[2] {
    v1 = all_reduce_start[reduce=sum, over=tp] v0    : pending<f32[2]>
    v2 = wait v1                                     : f32[2]
    return v2
}
";

fn program() -> Program {
    parse(TEXT, &OpTable::built_in()).unwrap().program
}

fn errors(program: &Program) -> Vec<String> {
    verify(program).iter().map(|error| error.headline()).collect()
}

#[test]
fn v4_groups_that_the_mesh_lacks() {
    for over in [GroupName::Axes(Axes::one(Axis(3))), GroupName::List(GroupId(0))] {
        let mut program = program();
        program.funcs[0].body.nodes[0].op = Op::new(AllReduceStart { reduce: Reduce::Sum, over });
        let message = "error[verify]: all_reduce_start: a group or axis that the mesh does not have (V4)";
        assert_eq!(errors(&program), [message]);
    }
}

#[test]
fn v4_axes_of_types_that_the_mesh_lacks() {
    let mut program = program();
    let Some(Type::Tensor(ty)) = program.funcs[0].types.get_mut(Value(0)) else { panic!() };
    ty.varies = ty.varies.union(Axes::one(Axis(5)));
    assert!(errors(&program)[0].ends_with("a type mentions an axis that the mesh does not have (V4)"));
}

#[test]
fn v5_ranks_along_axes_that_the_mesh_lacks() {
    let mut program = program();
    let Some(Type::Tensor(ty)) = program.funcs[0].types.get_mut(Value(0)) else { panic!() };
    ty.shape[0] = Index::sym(Sym::Rank(Axis(7)));
    assert!(errors(&program).iter().any(|error| error.ends_with("which has no value here (V5)")));
}

#[test]
fn v1_and_v3_values_without_a_type_or_a_definition() {
    let mut program = program();
    program.funcs[0].types.remove(Value(2));
    assert!(!errors(&program).is_empty());
    let mut other = self::program();
    other.funcs[0].body.nodes.remove(0);
    assert_eq!(errors(&other), ["error[verify]: wait: v1 is not defined before it is used (V1)"]);
}

#[test]
fn errors_of_the_parser_and_of_rules_have_facts() {
    let facts = |failure: &Failure| [&failure.op[..], &failure.expected, &failure.got].map(str::to_string);
    let wrong = |from: &str, to: &str| parse(&TEXT.replace(from, to), &OpTable::built_in());
    let error = Diagnostic::from(wrong("return", "give").map(drop).unwrap_err());
    assert_eq!(facts(&error.failure), ["", "the name of an op", "`give`"]);
    let error = Diagnostic::from(wrong(": f32[2]\n", "\n").map(drop).unwrap_err());
    assert_eq!(facts(&error.failure), ["", "`:` and a type", "the end of the line"]);
    let pending = wrong("wait v1 ", "neg v1 ").unwrap().program;
    assert_eq!(facts(&verify(&pending)[0].failure), ["neg: operand 0", "a tensor", "pending<f32[2]>"]);
}
