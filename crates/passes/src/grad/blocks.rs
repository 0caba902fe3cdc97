//! The backward of ops with blocks: of a conditional, a conditional; of a loop, the same loop from its last entry to the
//! first.

use consort_ir::entity::Value;
use consort_ir::ops::{Cond, Flag, Op, Scan, sum_over};
use consort_ir::program::Block;
use consort_ir::types::{TensorType, Type};
use consort_types::{Axes, Failure, GroupName};

use super::backward::{Backward, Cotangents, not_kept};
use super::tape::{Entry, Inside, Tape};
use super::values::Values;

/// Values that enter a block of the backward, and what they are in the forward.
#[derive(Default)]
struct Entering {
    operands: Vec<Value>,
    /// What each is inside.
    roles: Vec<Role>,
}

/// What a parameter of a block of the backward is.
#[derive(Clone, Copy)]
enum Role {
    /// The cotangent of a tensor of a result, by its number among the block's results.
    Cotangent(usize, usize),
    /// The value of a parameter of the forward block, by its number.
    Param(usize),
    /// A value that a block of the forward saved.
    Saved(usize, Value),
}

/// Tensors of parameters: the number of each, and of the tensor in it, with its type.
type Slots = Vec<(usize, usize, TensorType)>;

impl Entering {
    fn push(&mut self, operand: Value, role: Role) {
        self.operands.push(operand);
        self.roles.push(role);
    }
}

impl Backward<'_, '_> {
    /// Binds the parameters of an open block of the backward, and emits the backward of the forward block.
    fn inside(
        &mut self,
        inside: &Inside<'_>,
        number: usize,
        bound: &[(Role, Value)],
    ) -> Result<Cotangents, Box<Failure>> {
        let tape = &inside.tape;
        let (mut values, mut cotangents) = (Values::default(), Cotangents::new());
        for (role, value) in bound {
            match *role {
                Role::Cotangent(result, i) => {
                    let key = (tape.results[result], i);
                    let value = self.summed_to_pending(*value, key)?;
                    self.add(&mut cotangents, key, value)?;
                }
                Role::Param(param) => values.know(tape.params[param], *value),
                Role::Saved(block, inner) if block == number => values.know(inner, *value),
                Role::Saved(..) => {}
            }
        }
        let site = self.builder.site();
        self.block(tape, &mut values, &mut cotangents)?;
        self.builder.set_site(site);
        Ok(cotangents)
    }

    /// The cotangent of a tensor inside a pending that is carried as one that may differ over more axes. A pending cannot
    /// be spread, so the sum that the gradient of a spread takes is taken here.
    fn summed_to_pending(&mut self, value: Value, (of, i): (Value, usize)) -> Result<Value, Box<Failure>> {
        let own = match self.builder.ty(of)? {
            Type::Pending(tensors) => tensors.get(i).map_or(Axes::NONE, |ty| ty.varies),
            _ => return Ok(value),
        };
        let more = self.builder.ty(value)?.varies().minus(own);
        if more.is_empty() {
            return Ok(value);
        }
        sum_over(&mut self.builder, value, GroupName::Axes(more), self.sums)
    }

    /// The cotangents of a node's results that there are, as operands.
    fn of_results(
        &mut self,
        entry: &Entry<'_>,
        from: usize,
        cotangents: &mut Cotangents,
        entering: &mut Entering,
    ) -> Result<(), Box<Failure>> {
        for (number, result) in entry.results.iter().enumerate().skip(from) {
            for (i, _) in self.slots(*result)? {
                if let Some(cotangent) = cotangents.remove(&(*result, i)) {
                    entering.push(cotangent, Role::Cotangent(number, i));
                }
            }
        }
        Ok(())
    }

    pub(super) fn cond(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        values: &mut Values,
        cotangents: &mut Cotangents,
    ) -> Result<(), Box<Failure>> {
        let mut entering = Entering::default();
        self.of_results(entry, 0, cotangents, &mut entering)?;
        if entering.operands.is_empty() && !self.active.has_messages_in(entry.node) {
            return Ok(());
        }
        let Some(condition) = self.have(tape, values, entry.args[0])? else { return Err(not_kept()) };
        for (number, arg) in entry.args[1..].iter().enumerate() {
            if self.builder.ty(*arg)?.is_pending() {
                continue;
            }
            if let Some(value) = self.have(tape, values, *arg)? {
                entering.push(value, Role::Param(number));
            }
        }
        for (number, inside) in entry.blocks.iter().enumerate() {
            for (inner, outer) in &inside.saved {
                if let Some(value) = self.have(tape, values, *outer)? {
                    entering.push(value, Role::Saved(number, *inner));
                }
            }
        }
        let types = self.types(&entering.operands)?;
        let mut wanted: Vec<(usize, usize, TensorType)> = Vec::new();
        for (number, (old, arg)) in entry.node.args.iter().zip(&entry.args).enumerate().skip(1) {
            wanted.extend(self.slots_of(*old, *arg)?.into_iter().map(|(i, ty)| (number, i, ty)));
        }
        let (mut blocks, mut found): (Vec<Block>, Vec<bool>) = (Vec::new(), vec![false; wanted.len()]);
        for (number, inside) in entry.blocks.iter().enumerate() {
            let params = self.builder.begin_block(types.clone());
            let bound: Vec<(Role, Value)> = entering.roles.iter().copied().zip(params).collect();
            let made = self.inside(inside, number, &bound)?;
            let mut results = Vec::new();
            for ((arg, i, ty), found) in wanted.iter().zip(&mut found) {
                let cotangent = made.get(&(inside.tape.params[arg - 1], *i)).copied();
                *found |= cotangent.is_some();
                results.push(cotangent.map_or_else(|| self.zeros(ty), Ok)?);
            }
            blocks.push(self.builder.end_block(&results));
        }
        for block in &mut blocks {
            let mut found = found.iter();
            block.results.retain(|_| found.next().copied().unwrap_or(false));
        }
        let args: Vec<Value> = std::iter::once(condition).chain(entering.operands).collect();
        let results = self.builder.node(Op::new(Cond {}), &args, blocks)?;
        let wanted = wanted.into_iter().zip(found).filter(|(_, found)| *found).map(|(wanted, _)| wanted);
        for ((arg, i, _), result) in wanted.zip(results) {
            self.add(cotangents, (entry.args[arg], i), result)?;
        }
        Ok(())
    }

    fn types(&self, values: &[Value]) -> Result<Vec<Type>, Box<Failure>> {
        values.iter().map(|value| self.builder.ty(*value).cloned()).collect()
    }

    pub(super) fn looped(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        values: &mut Values,
        cotangents: &mut Cotangents,
    ) -> Result<(), Box<Failure>> {
        let reached =
            |result: &Value| cotangents.range((*result, 0)..=(*result, usize::MAX)).next().is_some();
        if !entry.results.iter().any(reached) && !self.active.has_messages_in(entry.node) {
            return Ok(());
        }
        let Some(scan) = entry.node.op.as_op::<Scan>() else {
            let failure = Failure::new("a loop whose number of iterations is not known has no gradient");
            return Err(
                failure.note("`scan` keeps what its iterations compute; or stop the gradient before it")
            );
        };
        let (inside, params) = (&entry.blocks[0], &entry.node.blocks[0].params);
        let first_rest = scan.carries + scan.slices;
        let (carried, summed) = self.passed_back(entry, scan)?;
        let (mut enter, mut types) = (Vec::new(), Vec::new());
        for (number, i, ty) in &carried {
            let cotangent = cotangents.remove(&(entry.results[*number], *i));
            enter.push(cotangent.map_or_else(|| self.zeros(ty), Ok)?);
            types.push(Type::Tensor(ty.clone()));
        }
        for (_, _, ty) in &summed {
            enter.push(self.zeros(ty)?);
            types.push(Type::Tensor(ty.clone()));
        }
        let carries = enter.len();
        let sliced = self.sliced(tape, entry, scan, (values, cotangents))?;
        for operand in &sliced.operands {
            let ty = self.builder.tensor_ty(*operand)?;
            types.push(ty.with_shape(ty.shape.get(1..).unwrap_or(&[]).to_vec()).into());
        }
        let mut rest = Entering::default();
        for (number, arg) in entry.args.iter().enumerate().skip(first_rest) {
            if let Some(value) = self.have(tape, values, *arg)? {
                rest.push(value, Role::Param(number));
            }
        }
        types.extend(self.types(&rest.operands)?);
        let reverse = Flag(!scan.reverse.0);
        let op = Scan { length: scan.length.clone(), carries, slices: sliced.operands.len(), reverse };
        let inner = self.builder.begin_block(types);
        let of_carries = carried.iter().map(|(number, i, _)| Role::Cotangent(*number, *i));
        let roles = sliced.roles.iter().chain(&rest.roles).copied();
        let bound = of_carries.zip(inner.iter().copied()).chain(roles.zip(inner[carries..].iter().copied()));
        let bound: Vec<(Role, Value)> = bound.collect();
        let made = self.inside(inside, 0, &bound)?;
        let of = |number: usize, i: usize| made.get(&(inside.tape.params[number], i)).copied();
        let mut results = Vec::new();
        for (number, i, ty) in &carried {
            results.push(of(*number, *i).map_or_else(|| self.zeros(ty), Ok)?);
        }
        for ((number, i, _), sum) in summed.iter().zip(&inner[carried.len()..]) {
            results.push(match of(*number, *i) {
                Some(cotangent) => self.sum(*sum, cotangent)?,
                None => *sum,
            });
        }
        let mut stacked = Vec::new();
        for (number, param) in params.iter().enumerate().take(first_rest).skip(scan.carries) {
            if let Some(cotangent) = of(number, 0).filter(|_| self.active.has(*param)) {
                stacked.push(number);
                results.push(cotangent);
            }
        }
        let block = self.builder.end_block(&results);
        let args = [enter, sliced.operands, rest.operands].concat();
        let results = self.builder.node(Op::new(op), &args, vec![block])?;
        let (ends, stacks) = results.split_at(carries);
        for ((number, i, _), value) in carried.iter().chain(&summed).zip(ends) {
            if self.active.has(entry.node.args[*number]) {
                let key = (entry.args[*number], *i);
                let value = self.summed_to_pending(*value, key)?;
                self.add(cotangents, key, value)?;
            }
        }
        for (number, stack) in stacked.into_iter().zip(stacks) {
            self.add(cotangents, (entry.args[number], 0), *stack)?;
        }
        Ok(())
    }

    /// What each iteration of a loop in reverse passes to the one before it: the cotangents of carries, and sums for
    /// what every iteration sees.
    fn passed_back(&self, entry: &Entry<'_>, scan: &Scan) -> Result<(Slots, Slots), Box<Failure>> {
        let (tape, params) = (&entry.blocks[0].tape, &entry.node.blocks[0].params);
        let (mut carried, mut summed) = (Vec::new(), Vec::new());
        for (number, param) in params.iter().enumerate() {
            // A carry that only the last iteration gives passes on to none before it.
            let result = entry.node.results.get(number).filter(|result| self.active.has(**result));
            let old = if number < scan.carries { *result.unwrap_or(param) } else { *param };
            let slots = self.slots_of(old, tape.params[number])?;
            let slots = slots.into_iter().map(|(i, ty)| (number, i, ty));
            if number < scan.carries {
                carried.extend(slots);
            } else if number >= scan.carries + scan.slices {
                summed.extend(slots);
            }
        }
        Ok((carried, summed))
    }

    /// What the iterations of a loop in reverse are given: the cotangents of what the loop stacked, what it sliced, and
    /// what it saved.
    fn sliced(
        &mut self,
        tape: &Tape<'_>,
        entry: &Entry<'_>,
        scan: &Scan,
        (values, cotangents): (&mut Values, &mut Cotangents),
    ) -> Result<Entering, Box<Failure>> {
        let mut sliced = Entering::default();
        self.of_results(entry, scan.carries, cotangents, &mut sliced)?;
        for (number, arg) in entry.args.iter().enumerate().skip(scan.carries).take(scan.slices) {
            if let Some(value) = self.have(tape, values, *arg)? {
                sliced.push(value, Role::Param(number));
            }
        }
        for (inner, outer) in &entry.blocks[0].saved {
            if let Some(value) = self.have(tape, values, *outer)? {
                sliced.push(value, Role::Saved(0, *inner));
            }
        }
        Ok(sliced)
    }
}
