//! Runs plans of all ranks on threads.

use std::time::{Duration, Instant};

use consort_comm::{Clock, Group, spawn_with_heap};
use consort_ir::literal::Literal;
use consort_ir::mesh::Mesh;
use consort_ir::program::{Block, Func};
use consort_ir::types::Type;
use consort_runtime::device::{Cpu, Device};
use consort_runtime::execute::{ArgValue, Exec, Out, OutTensor, RunCx, Stepped, Until};
use consort_types::{GroupName, Rank};

/// A rank: its world group, and the groups that programs use.
pub(crate) struct OneRank<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) all: Group,
    pub(crate) timeout: Duration,
    pub(crate) clock: Clock<'a>,
    /// What computes instead of the cores.
    pub(crate) device: Option<&'a dyn Device>,
    cpu: Cpu,
    groups: Vec<(GroupName, Option<Group>)>,
}

impl<'a> OneRank<'a> {
    pub(crate) fn new(mesh: &'a Mesh, all: Group) -> OneRank<'a> {
        OneRank {
            mesh,
            all,
            timeout: Duration::from_secs(20),
            clock: &Instant::now,
            device: None,
            cpu: Cpu::default(),
            groups: Vec::new(),
        }
    }

    /// The group; all ranks must ask for groups in the same order.
    pub(crate) fn group(&mut self, over: GroupName) -> Option<Group> {
        if let Some((_, group)) = self.groups.iter().find(|(other, _)| *other == over) {
            return group.clone();
        }
        if over == GroupName::Axes(self.mesh.all_axes()) {
            return Some(self.all.clone());
        }
        let ranks = (0..self.mesh.n_ranks()).map(Rank);
        let mut lists: Vec<Vec<usize>> = ranks
            .filter_map(|rank| self.mesh.members(over, rank))
            .map(|list| list.into_iter().map(|rank| rank.0 as usize).collect())
            .collect();
        lists.sort();
        lists.dedup();
        let group = self.all.subgroup(&lists, Instant::now() + self.timeout).unwrap();
        self.groups.push((over, group.clone()));
        group
    }

    /// Lowers a plan and creates all groups that it mentions.
    pub(crate) fn lower(&mut self, func: &Func) -> Result<Exec, String> {
        let mut used = Vec::new();
        groups_of(&func.body, &mut used);
        for group in used {
            self.group(group);
        }
        Exec::lower(self.mesh, func, self.device.unwrap_or(&self.cpu)).map_err(|error| error.to_string())
    }

    pub(crate) fn run(&mut self, exec: &mut Exec, args: &mut [ArgValue]) -> Result<Vec<Out>, String> {
        let list = exec.groups().to_vec();
        let groups: Vec<Option<Group>> = list.into_iter().map(|group| self.group(group)).collect();
        let (heap, timeout) = (self.all.heap(), self.timeout);
        let cx = RunCx {
            heap,
            groups: &groups,
            device: self.device.unwrap_or(&self.cpu),
            timeout,
            clock: self.clock,
        };
        exec.run(&cx, args).map(|outs| outs.into_vec()).map_err(|error| error.to_string())
    }

    /// The same step by step, and how often a step was blocked by each kind of cause: an operation in flight, a release, an
    /// argument, the device.
    pub(crate) fn step(
        &mut self,
        exec: &mut Exec,
        args: &mut [ArgValue],
    ) -> Result<(Vec<Out>, [usize; 4]), String> {
        let list = exec.groups().to_vec();
        let groups: Vec<Option<Group>> = list.into_iter().map(|group| self.group(group)).collect();
        let (heap, timeout) = (self.all.heap(), self.timeout);
        let device = self.device.unwrap_or(&self.cpu);
        let cx = RunCx { heap, groups: &groups, device, timeout, clock: self.clock };
        let mut blocked = [0; 4];
        let mut ran = exec.begin(&cx, args);
        while ran.is_ok() {
            ran = match exec.step(&cx) {
                Ok(Stepped::Ran) => Ok(()),
                Ok(Stepped::Blocked(until)) => {
                    let kind = match until {
                        Until::Arrival(_) => 0,
                        Until::Release => 1,
                        Until::Argument(_) => 2,
                        Until::Launched(_) => 3,
                    };
                    blocked[kind] += 1;
                    exec.block(until, &cx)
                }
                Ok(Stepped::Done) => break,
                Err(error) => Err(error),
            };
        }
        let outs = exec.end(&cx, ran).map_err(|error| error.to_string())?;
        Ok((outs.into_vec(), blocked))
    }

    pub(crate) fn args(&self, func: &Func, inputs: &[Literal]) -> Vec<ArgValue> {
        let params = func.body.params.iter().map(|param| func.ty(*param).unwrap());
        let one = |(ty, input): (&Type, &Literal)| match ty {
            Type::Size(..) => ArgValue::Size(input.as_size().unwrap()),
            _ => {
                let buffer = self.all.heap().alloc_from(&input.to_bytes()).unwrap();
                ArgValue::Tensor { buffer, pending: None }
            }
        };
        params.zip(inputs).map(one).collect()
    }

    /// The results as literals. Pendings are waited for first: results may share a buffer, which can be read
    /// only when nothing in flight writes it.
    pub(crate) fn tensors(&self, mut outs: Vec<Out>) -> Result<Vec<Literal>, String> {
        for out in &mut outs {
            if let Out::Pending { pending, .. } = out
                && let Some(pending) = pending.take()
            {
                pending.wait_within(self.timeout).map_err(|error| error.to_string())?;
            }
        }
        let mut tensors = Vec::new();
        for out in outs {
            match out {
                Out::Tensor(one) => tensors.push(tensor(&one)),
                Out::Size(value) => tensors.push(Literal::size(value)),
                Out::Pending { tensors: inside, .. } => tensors.extend(inside.iter().map(tensor)),
            }
        }
        Ok(tensors)
    }
}

/// A result, element by element.
pub(crate) fn tensor(out: &OutTensor) -> Literal {
    let OutTensor { buffer, layout, dtype, .. } = out;
    let (bytes, width) = (buffer.bytes().unwrap(), dtype.size());
    let mut packed = Vec::new();
    for i in 0..layout.numel() {
        let (mut rest, mut at) = (i, layout.start);
        for (size, stride) in layout.shape.iter().zip(&layout.strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        packed.extend_from_slice(&bytes[at * width..(at + 1) * width]);
    }
    Literal::from_bytes(*dtype, layout.shape.to_vec(), &packed).unwrap()
}

/// Runs one plan for each rank, once.
pub(crate) fn run(mesh: &Mesh, plans: &[Func], inputs: &[Vec<Literal>]) -> Vec<Result<Vec<Literal>, String>> {
    spawn_with_heap(plans.len(), 1 << 26, |all| {
        let me = all.rank();
        let mut rank = OneRank::new(mesh, all);
        let mut exec = rank.lower(&plans[me])?;
        let mut args = rank.args(&plans[me], &inputs[me]);
        let outs = rank.run(&mut exec, &mut args)?;
        rank.tensors(outs)
    })
}

/// The groups that a program mentions, the same on every rank.
fn groups_of(block: &Block, used: &mut Vec<GroupName>) {
    for node in &block.nodes {
        used.extend(node.op.effects().starts());
        node.blocks.iter().for_each(|block| groups_of(block, used));
    }
}
