//! Takes out what a gradient does not need after all: values that nothing reads, and what blocks take and return for
//! nothing.

use std::collections::BTreeSet;

use consort_ir::entity::{Value, ValueMap};
use consort_ir::ops::{Cond, Op, Scan};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::Type;

use crate::pipeline::Fuel;
use crate::remove;

/// Prunes until nothing changes.
pub(super) fn prune(func: &mut Func) {
    loop {
        remove::from(func, &mut Fuel::new(u64::MAX));
        if !block(&mut func.body, &mut func.types) {
            break;
        }
    }
}

fn block(block: &mut Block, types: &mut ValueMap<Type>) -> bool {
    let mut used: BTreeSet<Value> = block.results.iter().copied().collect();
    let mut changed = false;
    for node in block.nodes.iter_mut().rev() {
        changed |= narrow(node, &used, types);
        node.blocks.iter_mut().for_each(|inside| changed |= self::block(inside, types));
        used.extend(&node.args);
    }
    changed
}

/// Takes out operands that no block of a node reads, and results that nothing reads. Carries stay.
fn narrow(node: &mut Node, used: &BTreeSet<Value>, types: &mut ValueMap<Type>) -> bool {
    let scan = node.op.as_op::<Scan>().cloned();
    let first_result = match &scan {
        Some(scan) => scan.carries,
        None if node.op.as_op::<Cond>().is_some() => 0,
        None => return false,
    };
    let is_tensor =
        |types: &ValueMap<Type>, value: Value| types.get(value).is_some_and(|ty| !ty.is_pending());
    let keeps: Vec<bool> = (0..node.results.len())
        .map(|i| i < first_result || used.contains(&node.results[i]) || !is_tensor(types, node.results[i]))
        .collect();
    let mut read: BTreeSet<Value> = BTreeSet::new();
    for block in &node.blocks {
        read.extend(block.nodes.iter().flat_map(|node| &node.args));
        read.extend(block.results.iter().zip(&keeps).filter(|(_, keep)| **keep).map(|(result, _)| *result));
    }
    let skip = usize::from(scan.is_none());
    let takes = |at: usize| {
        at < first_result
            || node.blocks.iter().any(|block| {
                block.params.get(at).is_none_or(|param| read.contains(param) || !is_tensor(types, *param))
            })
    };
    let takes: Vec<bool> = (0..node.args.len() - skip).map(takes).collect();
    if keeps.iter().chain(&takes).all(|keep| *keep) {
        return false;
    }
    let mut gone: Vec<Value> = Vec::new();
    let slices = scan.as_ref().map(|scan| {
        let own = takes.iter().skip(scan.carries).take(scan.slices);
        own.filter(|takes| **takes).count()
    });
    retain(&mut node.results, &keeps, &mut gone);
    let operands = [vec![true; skip], takes.clone()].concat();
    retain(&mut node.args, &operands, &mut Vec::new());
    for block in &mut node.blocks {
        retain(&mut block.params, &takes, &mut gone);
        retain(&mut block.results, &keeps, &mut Vec::new());
    }
    gone.iter().for_each(|value| drop(types.remove(*value)));
    if let (Some(scan), Some(slices)) = (scan, slices) {
        node.op = Op::new(Scan { slices, ..scan });
    }
    true
}

/// Keeps the entries that are marked; the others are appended to `gone`.
fn retain(list: &mut Vec<Value>, keeps: &[bool], gone: &mut Vec<Value>) {
    let mut keeps = keeps.iter();
    list.retain(|value| {
        let keep = keeps.next().copied().unwrap_or(true);
        if !keep {
            gone.push(*value);
        }
        keep
    });
}

/// Takes out ops that are there for their gradient alone.
pub(super) fn take_out_rules(func: &mut Func) {
    let mut replaced: ValueMap<Value> = ValueMap::default();
    take_out(&mut func.body, &mut func.types, &mut replaced);
}

fn take_out(block: &mut Block, types: &mut ValueMap<Type>, replaced: &mut ValueMap<Value>) {
    let resolve = |replaced: &ValueMap<Value>, value: &mut Value| {
        *value = replaced.get(*value).copied().unwrap_or(*value);
    };
    block.nodes.retain_mut(|node| {
        node.args.iter_mut().for_each(|arg| resolve(replaced, arg));
        node.blocks.iter_mut().for_each(|inside| take_out(inside, types, replaced));
        let stays = !node.op.is_rule_alone();
        for (result, operand) in node.results.iter().zip(&node.args).filter(|_| !stays) {
            types.remove(*result);
            replaced.insert(*result, *operand);
        }
        stays
    });
    block.results.iter_mut().for_each(|result| resolve(replaced, result));
}
