//! Storage before placement: which tensors share it, which bytes each takes, and which lines touch them.
//!
//! A *buf* is storage; a *part* of it is the view of one tensor. A buf can later become a piece of another one: then
//! its tensors lie there from the beginning. So nothing here is final until all lines are processed.

use consort_ir::plan::Place;
use consort_types::layout::Layout;
use consort_types::overlaps;

/// The location of a tensor in storage.
#[derive(Clone, Debug)]
pub(super) struct Located {
    /// Its buf.
    pub(super) buf: u32,
    /// Its place: the byte offset in the buf.
    pub(super) at: u64,
    /// Its layout, relative to its place; `None` if sizes are unknown, and then it is the whole buf.
    pub(super) layout: Option<Layout>,
    /// Bytes of an element.
    pub(super) element: u64,
}

impl Located {
    /// The offset of its first element; its place if it has none.
    fn first(&self) -> u64 {
        let some = self.layout.as_ref().filter(|layout| !layout.shape.contains(&0));
        self.at + some.map_or(0, |layout| layout.start as u64 * self.element)
    }

    /// The same, contiguous from its first element.
    pub(super) fn without_gaps(&self) -> Located {
        let layout = self.layout.as_ref().map(|layout| Layout::contiguous(&layout.shape));
        Located { buf: self.buf, at: self.first(), layout, element: self.element }
    }

    /// The byte range of the buf that contains it.
    fn bytes(&self) -> (u64, u64) {
        match &self.layout {
            Some(layout) => (self.first(), self.first() + layout.span() as u64 * self.element),
            None => (0, u64::MAX),
        }
    }
}

/// A tensor in storage, and its live range.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) located: Located,
    /// The last line that needs it, and the last one without the function's return.
    pub(super) last: u32,
    pub(super) read: u32,
}

impl Part {
    /// Whether it is contiguous.
    pub(super) fn is_flat(&self) -> bool {
        self.located.layout.as_ref().is_none_or(Layout::is_contiguous)
    }

    /// Its strides, if known.
    pub(super) fn strides(&self) -> Option<&[usize]> {
        self.located.layout.as_ref().map(|layout| &layout.strides[..])
    }
}

/// The kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufKind {
    /// That of a parameter.
    Arg(u32),
    /// Allocated by the plan.
    Own,
    /// Allocated by the plan, with a size known only at run time.
    Dyn,
}

/// A buf.
#[derive(Debug)]
pub(super) struct Buf {
    pub(super) kind: BufKind,
    pub(super) size: u64,
    /// Whether it may be reused when its tensors are dead.
    pub(super) writable: bool,
    /// Whether it is or was writable: false only for an argument that was not donated.
    pub(super) written: bool,
    /// The block that created it.
    pub(super) block: u32,
    /// The live range: the line that first writes it, and the last one that needs it.
    pub(super) def: u32,
    pub(super) last: u32,
    /// The line that created it, and its later pieces: from, to, and the line from which each is live.
    made: u32,
    pieces: Vec<(u64, u64, u32)>,
    /// Whether it takes part in communication.
    pub(super) shared: bool,
    /// Whether it outlives the function.
    pub(super) outlives: bool,
    /// The parent buf and the offset in it; itself if it has none.
    parent: (u32, u64),
    /// The parts not known to be dead.
    parts: Vec<u32>,
    /// Lines that read or write bytes of it, in order.
    touched: Vec<Touch>,
    /// Its final place.
    pub(super) place: Option<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Touch {
    line: u32,
    bytes: (u64, u64),
    /// The destination buf if a start copies from here; no access if that turns out to be the same place.
    over: Option<u32>,
}

/// Bytes of a root buf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Span {
    pub(super) buf: u32,
    pub(super) from: u64,
    pub(super) to: u64,
}

impl Span {
    pub(super) fn meets(&self, other: &Span) -> bool {
        self.buf == other.buf && overlaps(&(self.from..self.to), &(other.from..other.to))
    }
}

/// All storage of a function.
#[derive(Debug, Default)]
pub(super) struct Storage {
    pub(super) parts: Vec<Part>,
    pub(super) bufs: Vec<Buf>,
}

impl Storage {
    pub(super) fn add_buf(&mut self, kind: BufKind, size: u64, line: u32, block: u32) -> u32 {
        let number = self.bufs.len() as u32;
        self.bufs.push(Buf {
            kind,
            size,
            writable: true,
            written: true,
            block,
            def: line,
            last: line,
            made: line,
            pieces: Vec::new(),
            shared: false,
            outlives: false,
            parent: (number, 0),
            parts: Vec::new(),
            touched: Vec::new(),
            place: None,
        });
        number
    }

    pub(super) fn add_part(&mut self, part: Part) -> u32 {
        let number = self.parts.len() as u32;
        let (buf, _) = self.root(part.located.buf);
        let entry = &mut self.bufs[buf as usize];
        entry.last = entry.last.max(part.last);
        entry.parts.push(number);
        self.parts.push(part);
        number
    }

    /// Extends the live range of a part.
    pub(super) fn prolong(&mut self, part: u32, last: u32, read: u32) {
        let entry = &mut self.parts[part as usize];
        entry.last = entry.last.max(last);
        entry.read = entry.read.max(read);
        let (buf, last) = (entry.located.buf, entry.last);
        let buf = self.buf_mut(buf);
        buf.last = buf.last.max(last);
    }

    /// The root of a buf, and the offset in it.
    pub(super) fn root(&mut self, buf: u32) -> (u32, u64) {
        let (mut root, mut shift) = (buf, 0);
        while self.bufs[root as usize].parent.0 != root {
            let (above, at) = self.bufs[root as usize].parent;
            (root, shift) = (above, shift + at);
        }
        // Path compression.
        let (mut piece, mut rest) = (buf, shift);
        while piece != root {
            let (above, at) = std::mem::replace(&mut self.bufs[piece as usize].parent, (root, rest));
            (piece, rest) = (above, rest - at);
        }
        (root, shift)
    }

    pub(super) fn buf_mut(&mut self, buf: u32) -> &mut Buf {
        let (root, _) = self.root(buf);
        &mut self.bufs[root as usize]
    }

    /// The byte range of a part in its root.
    pub(super) fn span(&mut self, part: u32) -> Span {
        let located = &self.parts[part as usize].located;
        let (bytes, buf) = (located.bytes(), located.buf);
        let (buf, shift) = self.root(buf);
        Span { buf, from: bytes.0.saturating_add(shift), to: bytes.1.saturating_add(shift) }
    }

    /// The offset of a part's first element in its root.
    pub(super) fn first(&mut self, part: u32) -> (u32, u64) {
        let (first, buf) = (self.parts[part as usize].located.first(), self.parts[part as usize].located.buf);
        let (buf, shift) = self.root(buf);
        (buf, first + shift)
    }

    /// A part that overlaps a span and is live after a line.
    pub(super) fn needed(&mut self, span: Span, after: u32) -> Option<&Part> {
        let mut list = std::mem::take(&mut self.bufs[span.buf as usize].parts);
        list.retain(|part| self.parts[*part as usize].last >= after);
        let found = list
            .iter()
            .copied()
            .find(|part| self.parts[*part as usize].last > after && self.span(*part).meets(&span));
        self.bufs[span.buf as usize].parts = list;
        found.map(|part| &self.parts[part as usize])
    }

    /// Records that a line reads or writes bytes.
    pub(super) fn touch(&mut self, span: Span, line: u32) {
        self.note(span, line, None);
    }

    /// Records that a start copies these bytes to the buf of its result, unless that is the same place.
    pub(super) fn touch_over(&mut self, span: Span, line: u32, result: u32) {
        self.note(span, line, Some(result));
    }

    fn note(&mut self, span: Span, line: u32, over: Option<u32>) {
        if span.from < span.to {
            let bytes = (span.from, span.to);
            self.bufs[span.buf as usize].touched.push(Touch { line, bytes, over });
        }
    }

    /// Whether no line since the definition of `buf` has touched the bytes, except the start that has `buf` as its
    /// result and these bytes as its operand.
    fn untouched(&self, span: Span, buf: u32) -> bool {
        /// The limit of the search.
        const FAR: usize = 4096;
        let (bytes, since) = ((span.from, span.to), self.bufs[buf as usize].def);
        let mut recent =
            self.bufs[span.buf as usize].touched.iter().rev().take_while(|touch| touch.line >= since);
        let own = |touch: &Touch| {
            touch.line == since
                && touch.bytes == bytes
                && touch.over.is_some_and(|result| self.bufs[result as usize].parent.0 == buf)
        };
        let meets = |touch: &Touch| overlaps(&(touch.bytes.0..touch.bytes.1), &(span.from..span.to));
        let met = recent.by_ref().take(FAR).any(|touch| meets(touch) && !own(touch));
        !met && recent.next().is_none()
    }

    /// The buf that a part fills, if it may still become a piece of another.
    pub(super) fn movable(&mut self, part: u32, block: u32) -> Option<u32> {
        let Span { buf, from, to } = self.span(part);
        let root = &self.bufs[buf as usize];
        let fills = from == 0 && to == root.size && to > 0 && self.parts[part as usize].is_flat();
        (fills && root.kind == BufKind::Own && root.writable && root.block == block).then_some(buf)
    }

    /// Makes the buf of a part a piece of another buf, if those bytes are untouched since its definition.
    pub(super) fn move_to(&mut self, part: u32, to: Span, block: u32) -> bool {
        let Some(buf) = self.movable(part, block) else { return false };
        let fits = self.bufs[buf as usize].size == to.to - to.from && buf != to.buf;
        if !fits || !self.untouched(to, buf) {
            return false;
        }
        self.join(buf, to.buf, to.from);
        true
    }

    /// Makes a buf a piece of another.
    pub(super) fn join(&mut self, buf: u32, whole: u32, at: u64) {
        let mut pieces = self.pieces(buf);
        let piece = &mut self.bufs[buf as usize];
        if pieces.is_empty() {
            pieces.push((0, piece.size, piece.def));
        }
        piece.parent = (whole, at);
        let (def, last, shared, outlives) = (piece.def, piece.last, piece.shared, piece.outlives);
        let parts = std::mem::take(&mut piece.parts);
        let whole = &mut self.bufs[whole as usize];
        whole.def = whole.def.min(def);
        whole.last = whole.last.max(last);
        whole.shared |= shared;
        whole.outlives |= outlives;
        whole.parts.extend(parts);
        // A piece that is older than the whole has its own live range.
        if def < whole.made {
            whole.pieces.extend(pieces.into_iter().map(|(from, to, def)| (from + at, to + at, def)));
        }
    }

    /// If parts of a buf become live later: byte ranges, and the line from which each is live.
    pub(super) fn pieces(&self, buf: u32) -> Vec<(u64, u64, u32)> {
        let buf = &self.bufs[buf as usize];
        let mut pieces = buf.pieces.clone();
        if pieces.is_empty() {
            return pieces;
        }
        pieces.sort_unstable();
        let mut at = 0;
        for i in 0..pieces.len() {
            if at < pieces[i].0 {
                pieces.push((at, pieces[i].0, buf.made));
            }
            at = pieces[i].1;
        }
        if at < buf.size {
            pieces.push((at, buf.size, buf.made));
        }
        pieces
    }
}
