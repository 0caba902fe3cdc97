//! Decides the storage of each result, line by line.

use consort_ir::entity::Value;
use consort_ir::ops::{Alias, Effects, EvalCx, Flow, Joined, boxes_of, view_of};
use consort_ir::program::{Block, Func, Node};
use consort_ir::types::{TensorType, Type};
use consort_types::layout::{Dims, Layout};
use consort_types::{Held, layout};

use super::PlanError;
use super::storage::{BufKind, Located, Part, Span, Storage};
use super::uses::{Uses, View};

/// The decisions for a line, besides the storage of its results.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Whether it is a view, so that nothing runs.
    pub(super) view: bool,
    /// Operands whose storage the results reuse.
    pub(super) reuse: Vec<Value>,
    /// Operands that are copied.
    pub(super) copies: Vec<Copied>,
    /// The bytes that are written, relative to the result's place; `None` means all.
    pub(super) writes: Option<Vec<(u64, u64)>>,
}

/// An operand that is copied to its result's place, unless both turn out to be the same place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copied {
    pub(super) value: Value,
    pub(super) why: Held,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The parts of a value: index of the first, and count.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PartsOf(u32, u32);

/// A function whose storage is being decided.
pub(super) struct Planner<'a> {
    pub(super) func: &'a Func,
    pub(super) sizes: EvalCx<'a>,
    pub(super) uses: Uses<'a>,
    pub(super) storage: Storage,
    /// Indexed by value number.
    parts: Vec<PartsOf>,
    /// Indexed by line, without those that end blocks.
    pub(super) lines: Vec<Line>,
    /// The current line.
    pub(super) now: u32,
    /// The current block: its number, the number of blocks, its results, and the spans of its carries.
    pub(super) block: u32,
    pub(super) blocks: u32,
    pub(super) results: &'a [Value],
    pub(super) carries: Vec<Option<Span>>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(func: &'a Func, sizes: EvalCx<'a>) -> Planner<'a> {
        let uses = Uses::new(func);
        let parts = vec![PartsOf::default(); uses.len()];
        Planner {
            func,
            sizes,
            uses,
            storage: Storage::default(),
            parts,
            lines: Vec::with_capacity(func.body.nodes.len()),
            now: 0,
            block: 0,
            blocks: 1,
            results: &func.body.results,
            carries: Vec::new(),
        }
    }

    /// Decides the whole function.
    pub(super) fn func(&mut self, donated: &[bool]) -> Result<(), PlanError> {
        for (number, param) in self.func.body.params.iter().enumerate() {
            let Some(ty) = self.func.ty(*param) else { continue };
            let mut parts = Vec::new();
            let mut size = 0u64;
            for tensor in ty.tensors() {
                let layout = self.known_layout(tensor)?;
                let at = size.next_multiple_of(super::pack::ALIGN);
                size = at + bytes(&layout, tensor);
                parts.push(Located { buf: 0, at, layout: Some(layout), element: tensor.dtype.size() as u64 });
            }
            if parts.is_empty() {
                continue;
            }
            let buf = self.storage.add_buf(BufKind::Arg(number as u32), size, self.now, self.block);
            // A pending argument is leased by a start that no line can name.
            let given = donated.get(number) == Some(&true) && ty.as_tensor().is_some();
            let entry = &mut self.storage.bufs[buf as usize];
            (entry.writable, entry.written) = (given, given);
            self.define(*param, parts.into_iter().map(|located| Located { buf, ..located }));
        }
        self.body(&self.func.body)
    }

    /// Decides the lines of a block.
    pub(super) fn body(&mut self, block: &'a Block) -> Result<(), PlanError> {
        block.nodes.iter().try_for_each(|node| self.node(node))?;
        self.now += 1;
        for result in &block.results {
            for part in self.parts_of(*result) {
                let span = self.storage.span(part);
                self.storage.touch(span, self.now);
            }
        }
        Ok(())
    }

    fn node(&mut self, node: &'a Node) -> Result<(), PlanError> {
        self.now += 1;
        let number = self.lines.len();
        self.lines.push(Line::default());
        let line = match (node.op.effects(), node.op.flow()) {
            (Effects::Collective(_) | Effects::Messages(_), _) => self.start(node)?,
            (Effects::Wait, _) => self.wait(node),
            (_, Flow::Straight) => self.straight(node)?,
            (_, Flow::Cond) => self.cond(node)?,
            (_, Flow::Loop { carries, slices, .. }) => self.repeat(node, carries, slices)?,
        };
        self.lines[number] = line;
        Ok(())
    }

    /// The parts of a value, in order.
    pub(super) fn parts_of(&self, value: Value) -> std::ops::Range<u32> {
        let PartsOf(first, n) = self.parts[self.uses.id(value)];
        first..first + n
    }

    /// The one part of a tensor.
    pub(super) fn part(&self, value: Value) -> u32 {
        self.parts[self.uses.id(value)].0
    }

    /// Defines a value at these locations, and its views.
    pub(super) fn define(&mut self, value: Value, tensors: impl IntoIterator<Item = Located>) {
        self.set(value, tensors);
        self.views(value);
    }

    fn set(&mut self, value: Value, tensors: impl IntoIterator<Item = Located>) {
        let id = self.uses.id(value);
        let used = *self.uses.get(value);
        let first = self.storage.parts.len() as u32;
        for located in tensors {
            let buf = located.buf;
            self.storage.add_part(Part { located, last: used.last.max(self.now), read: used.read });
            self.storage.buf_mut(buf).outlives |= used.outlives;
        }
        self.parts[id] = PartsOf(first, self.storage.parts.len() as u32 - first);
    }

    /// Makes all possible views of a value now, so that only the bytes that they see stay live until their uses. An op
    /// that cannot be a view reads the value when it runs.
    fn views(&mut self, value: Value) {
        let mut values = Vec::new();
        let mut next = Some(value);
        while let Some(value) = next {
            let views: Vec<View<'a>> = self.uses.views_of(value).collect();
            for View { node, line, .. } in views {
                if self.view(node) {
                    values.extend(&node.results);
                } else {
                    let part = self.part(value);
                    self.storage.prolong(part, line, line);
                }
            }
            next = values.pop();
        }
    }

    /// Gives a value the parts of another, which stay live as long as it is used.
    pub(super) fn same(&mut self, value: Value, parts: std::ops::Range<u32>) {
        let used = *self.uses.get(value);
        for part in parts.clone() {
            self.storage.prolong(part, used.last.max(self.now), used.read);
            let buf = self.storage.parts[part as usize].located.buf;
            self.storage.buf_mut(buf).outlives |= used.outlives;
        }
        let id = self.uses.id(value);
        self.parts[id] = PartsOf(parts.start, parts.len() as u32);
        self.views(value);
    }

    /// The contiguous layout of a tensor; `None` if a size is unbacked.
    pub(super) fn layout(&self, tensor: &TensorType) -> Result<Option<Layout>, PlanError> {
        let mut shape = Dims::new();
        for size in &tensor.shape {
            match size
                .as_const()
                .map_or_else(|| self.sizes.size(size), |n| Ok(usize::try_from(n).unwrap_or(0)))
            {
                Ok(size) => shape.push(size),
                Err(_) if is_unbacked(tensor) => return Ok(None),
                Err(error) => {
                    return Err(PlanError::UnknownSize {
                        func: self.func.name.clone(),
                        ty: tensor.display(self.sizes.mesh).to_string(),
                        why: error.to_string(),
                    });
                }
            }
        }
        let bytes = layout::numel(&shape).and_then(|n| n.checked_mul(tensor.dtype.size()));
        match bytes.filter(|bytes| i64::try_from(*bytes).is_ok()) {
            Some(_) => Ok(Some(Layout::contiguous(&shape))),
            None => Err(PlanError::TooLarge {
                func: self.func.name.clone(),
                what: tensor.display(self.sizes.mesh).to_string(),
            }),
        }
    }

    /// The layout of a parameter of the function, whose sizes are never unbacked.
    fn known_layout(&self, tensor: &TensorType) -> Result<Layout, PlanError> {
        self.layout(tensor)?.ok_or_else(|| PlanError::UnknownSize {
            func: self.func.name.clone(),
            ty: tensor.display(self.sizes.mesh).to_string(),
            why: "an argument has an unbacked size".to_string(),
        })
    }

    /// Allocates storage for one tensor, from a line on.
    pub(super) fn new_buf(&mut self, tensor: &TensorType, line: u32) -> Result<Located, PlanError> {
        let layout = self.layout(tensor)?;
        let (kind, size) = match &layout {
            Some(layout) => (BufKind::Own, bytes(layout, tensor)),
            None => (BufKind::Dyn, 0),
        };
        let buf = self.storage.add_buf(kind, size, line, self.block);
        Ok(Located { buf, at: 0, layout, element: tensor.dtype.size() as u64 })
    }

    /// Allocates new storage for a value.
    pub(super) fn fresh(&mut self, value: Value) -> Result<(), PlanError> {
        match self.func.ty(value) {
            Some(Type::Tensor(tensor)) => {
                let located = self.new_buf(tensor, self.now)?;
                self.define(value, [located]);
            }
            Some(Type::Pending(tensors)) => {
                let located = tensors
                    .iter()
                    .map(|tensor| self.new_buf(tensor, self.now))
                    .collect::<Result<Vec<_>, _>>()?;
                self.define(value, located);
            }
            _ => {}
        }
        self.touch(value);
        Ok(())
    }

    /// Records that this line reads or writes all bytes of a value.
    pub(super) fn touch(&mut self, value: Value) {
        for part in self.parts_of(value) {
            let span = self.storage.span(part);
            self.storage.touch(span, self.now);
        }
    }

    fn straight(&mut self, node: &'a Node) -> Result<Line, PlanError> {
        let mut line = Line::default();
        match node.op.alias() {
            // If possible, it became a view when its operand was defined.
            Alias::View if node.results.iter().all(|result| !self.parts_of(*result).is_empty()) => {
                line.view = true;
                if node.op.effects() == Effects::Host {
                    node.args.iter().for_each(|arg| self.touch(*arg));
                }
                return Ok(line);
            }
            Alias::Reuse => {
                // Shared storage would have to be waited for, so it is tried last.
                let n = node.args.len();
                let mut args = (0..2 * n).map(|i| (i % n, i >= n));
                if let Some((taken, _)) = args
                    .find(|(i, shared)| self.is_shared(node.args[*i]) == *shared && self.over(node, *i, true))
                {
                    line.reuse.push(node.args[taken]);
                }
            }
            Alias::First if node.op.joins() => {
                if self.update(node, &mut line) {
                    return Ok(line);
                }
            }
            Alias::First => {
                if self.over(node, 0, false) {
                    line.reuse.push(node.args[0]);
                }
            }
            Alias::View | Alias::None => {}
        }
        node.args.iter().for_each(|arg| self.touch(*arg));
        if line.reuse.is_empty() {
            node.results.iter().try_for_each(|result| self.fresh(*result))?;
            if node.op.joins() {
                self.join(node, &mut line);
            }
        }
        Ok(line)
    }

    /// Whether a tensor's storage is known to take part in communication.
    fn is_shared(&mut self, value: Value) -> bool {
        let buf = self.storage.parts[self.part(value) as usize].located.buf;
        self.storage.buf_mut(buf).shared
    }

    /// Makes the results views of the operand, if possible.
    fn view(&mut self, node: &'a Node) -> bool {
        let Located { buf, at, layout, element } =
            self.storage.parts[self.part(node.args[0]) as usize].located.clone();
        let Some(layout) = layout else {
            // The sizes are unknown, but there are no gaps. A result whose sizes are known has no elements, and is
            // placed elsewhere.
            let tensor = self.func.ty(node.results[0]).and_then(Type::as_tensor);
            let unknown = tensor.is_some_and(|tensor| matches!(self.layout(tensor), Ok(None)));
            if !unknown || !node.op.keeps_order() {
                return false;
            }
            self.set(node.results[0], [Located { buf, at, layout, element }]);
            return true;
        };
        // If the op mentions unknown sizes, it runs at run time.
        let Some(shapes) = self.shapes(&node.results) else { return false };
        let shapes = shapes.iter().map(|shape| &shape[..]);
        let Ok(Some(layouts)) = view_of(&*node.op, &self.sizes, &layout, shapes) else { return false };
        let flat =
            |(result, layout): (&Value, &Layout)| !self.uses.get(*result).flat || layout.is_contiguous();
        if !node.results.iter().zip(&layouts).all(flat) {
            return false;
        }
        for (result, layout) in node.results.iter().zip(layouts) {
            self.set(*result, [Located { buf, at, layout: Some(layout), element }]);
        }
        true
    }

    /// Places the result over an operand in place, if the types match and the operand is dead.
    fn over(&mut self, node: &'a Node, operand: usize, elementwise: bool) -> bool {
        let (Some(Type::Tensor(from)), Some(Type::Tensor(to))) =
            (self.func.ty(node.args[operand]), self.func.ty(node.results[0]))
        else {
            return false;
        };
        let part = self.part(node.args[operand]);
        if from.dtype != to.dtype || self.held(part).is_some() || !self.returns_there(node.results[0], part) {
            return false;
        }
        let same_shape = match &self.storage.parts[part as usize].located.layout {
            Some(layout) => matches!(self.layout(to), Ok(Some(to)) if to.shape == layout.shape),
            None => from.shape == to.shape,
        };
        let dynamic = self.storage.parts[part as usize].located.layout.is_none();
        let buf = self.storage.span(part).buf;
        if !same_shape || (self.storage.bufs[buf as usize].kind == BufKind::Dyn) != dynamic {
            return false;
        }
        let span = self.storage.span(part);
        for (_, other) in node.args.iter().enumerate().filter(|(other, _)| *other != operand) {
            let other = self.part(*other);
            // An elementwise op may read and write the same element.
            let same = elementwise
                && self.storage.first(other) == self.storage.first(part)
                && self.storage.parts[other as usize].strides()
                    == self.storage.parts[part as usize].strides();
            if self.storage.span(other).meets(&span) && !same {
                return false;
            }
        }
        self.take(node.results[0], part);
        self.touch(node.results[0]);
        true
    }

    /// Gives a value the storage of a contiguous part.
    pub(super) fn take(&mut self, value: Value, part: u32) {
        let located = self.storage.parts[part as usize].located.without_gaps();
        self.define(value, [located]);
    }

    /// The reason why a part cannot be overwritten after this line, if any.
    pub(super) fn held(&mut self, part: u32) -> Option<Held> {
        if !self.storage.parts[part as usize].is_flat() {
            return Some(Held::Gaps);
        }
        let (span, now) = (self.storage.span(part), self.now);
        let buf = &self.storage.bufs[span.buf as usize];
        if !buf.writable {
            return Some(if matches!(buf.kind, BufKind::Arg(_)) { Held::Argument } else { Held::Needed });
        }
        let needed = self.storage.needed(span, now)?;
        Some(if needed.read > now { Held::Needed } else { Held::Returned })
    }

    /// A block may return a value that aliases a carry only as that carry: carries do not change places.
    pub(super) fn returns_there(&mut self, value: Value, part: u32) -> bool {
        if self.carries.is_empty() || !self.results.contains(&value) {
            return true;
        }
        let span = self.storage.span(part);
        let meets = |(carry, _): &(&Option<Span>, &Value)| carry.is_some_and(|carry| carry.meets(&span));
        self.carries.iter().zip(self.results).filter(meets).all(|(_, result)| *result == value)
    }

    /// The boxes of a join, if all sizes are known.
    fn boxes(&self, node: &Node) -> Option<Vec<Joined>> {
        let layout = |arg: &Value| self.storage.parts[self.part(*arg) as usize].located.layout.as_ref();
        let shapes: Option<Vec<&[usize]>> =
            node.args.iter().map(|arg| layout(arg).map(|layout| &layout.shape[..])).collect();
        let whole = self.shapes(&node.results)?;
        boxes_of(&*node.op, &self.sizes, &shapes?, whole.first()?).ok()
    }

    /// The shapes of tensors, if all sizes are known.
    fn shapes(&self, values: &[Value]) -> Option<Vec<Dims>> {
        let shape = |value: &Value| {
            let tensor = self.func.ty(*value).and_then(Type::as_tensor)?;
            Some(self.layout(tensor).ok()??.shape)
        };
        values.iter().map(shape).collect()
    }

    /// Updates the base in place, if it may be overwritten, and moves the part into it if possible.
    fn update(&mut self, node: &'a Node, line: &mut Line) -> bool {
        let Some(boxes) = self.boxes(node) else { return false };
        // The rest of the base must stay, and exactly one whole part is inserted.
        let (stays, parts): (Vec<&Joined>, Vec<&Joined>) = boxes.iter().partition(|piece| piece.operand == 0);
        let [Joined { operand: 1, from, to, size }] = parts[..] else { return false };
        if stays.iter().any(|piece| piece.from != piece.to) || from.iter().any(|at| *at != 0) {
            return false;
        }
        let (base, part) = (self.part(node.args[0]), self.part(node.args[1]));
        let (x, y) = (&self.storage.parts[base as usize], &self.storage.parts[part as usize]);
        let (Some(layout), Some(small), true) = (&x.located.layout, &y.located.layout, x.is_flat()) else {
            return false;
        };
        if small.shape != *size {
            return false;
        }
        let place = layout.narrowed_to(to, size);
        let (buf, at, element, flat) =
            (x.located.buf, x.located.at, x.located.element, place.is_contiguous());
        // The base may be a view that begins inside its buf. The result begins at its first element.
        let before = (place.start - layout.start) as u64 * element;
        let (root, shift) = self.storage.root(buf);
        let from = shift + at + place.start as u64 * element;
        let span = Span { buf: root, from, to: from + place.span() as u64 * element };
        let (now, root) = (self.now, &self.storage.bufs[root as usize]);
        if !root.writable || root.kind == BufKind::Dyn || !self.returns_there(node.results[0], base) {
            return false;
        }
        if self.storage.parts[base as usize].last > now || self.storage.needed(span, now).is_some() {
            return false;
        }
        // A part that is in place already, or can be moved there, is not copied.
        let flat = flat && self.storage.parts[part as usize].is_flat();
        let there = flat && self.storage.first(part) == (span.buf, span.from);
        if !there && self.storage.span(part).meets(&span) {
            return false;
        }
        let stays = there || (flat && self.storage.move_to(part, span, self.block));
        if stays {
            line.writes = Some(Vec::new());
        } else {
            self.touch(node.args[1]);
            line.writes = Some(vec![(before, before + (span.to - span.from))]);
        }
        self.storage.touch(span, now);
        self.take(node.results[0], base);
        line.reuse.push(node.args[0]);
        true
    }

    /// Moves the parts into the result, if they are contiguous there.
    fn join(&mut self, node: &'a Node, line: &mut Line) {
        let whole = self.part(node.results[0]);
        let (Some(boxes), Some(layout)) =
            (self.boxes(node), &self.storage.parts[whole as usize].located.layout)
        else {
            return;
        };
        let places: Vec<Layout> =
            boxes.iter().map(|piece| layout.narrowed_to(&piece.to, &piece.size)).collect();
        if !places.iter().all(Layout::is_contiguous) {
            return;
        }
        let buf = self.storage.span(whole).buf;
        let mut writes = Vec::new();
        for (piece, place) in boxes.iter().zip(places) {
            let part = self.part(node.args[piece.operand]);
            let element = self.storage.parts[part as usize].located.element;
            let at = place.start as u64 * element;
            // Only a part that fills its storage can be moved, so the box must be the whole operand.
            let size = place.numel() as u64 * element;
            let made = self.storage.movable(part, self.block).filter(|made| *made != buf);
            match made.filter(|made| self.storage.bufs[*made as usize].size == size) {
                Some(made) => self.storage.join(made, buf, at),
                None => writes.push((at, at + size)),
            }
        }
        line.writes = Some(writes);
    }
}

fn bytes(layout: &Layout, tensor: &TensorType) -> u64 {
    layout.numel() as u64 * tensor.dtype.size() as u64
}

fn is_unbacked(tensor: &TensorType) -> bool {
    let mut unbacked = false;
    for size in &tensor.shape {
        size.symbols(&mut |sym| unbacked |= matches!(sym, consort_ir::index::Sym::Unbacked(_)));
    }
    unbacked
}
