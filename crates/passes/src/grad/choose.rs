//! Chooses what is computed again so that what is kept fits a budget, at the least cost.
//!
//! With a price for each kept byte, the least of cost and price together is a minimal cut: a value that is needed is kept, or
//! its step runs again, which needs the operands of the step. Prices are searched until two choices are left that are both
//! best for one price, of which one fits and one does not. What is best for a price is a lower bound of the cost for the
//! budget, since no choice that fits is below the line through the two. Between them branch and bound looks for the least
//! cost, with a cut as the bound of each branch: the choice is optimal unless [`WORK`] is reached, and then at most as
//! far from the optimum as the two choices are apart. All of it is a function of the problem alone, so that all ranks
//! choose alike.

use std::collections::VecDeque;

/// Branches times values that are looked at: a large function has fewer branches.
const WORK: usize = 200_000;

/// Bytes and costs count up to this, so that a sum of their products has 128 bits.
const MOST: u64 = 1 << 48;

/// A value that the backward may need.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    /// Its bytes, if it is kept.
    pub(super) bytes: u64,
    /// The step that computes it again; without one it must be kept.
    pub(super) step: Option<usize>,
    /// Whether the backward reads it in any case.
    pub(super) read: bool,
}

/// An operation that may run again.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) cost: u64,
    /// The values that it needs.
    pub(super) needs: Vec<usize>,
}

/// What may be kept, and what may run again instead.
#[derive(Clone, Debug, Default)]
pub(super) struct Problem {
    pub(super) values: Vec<Kept>,
    pub(super) steps: Vec<Step>,
}

/// Which steps run again, with what is kept then and what it costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) again: Vec<bool>,
    pub(super) bytes: u64,
    pub(super) cost: u64,
}

/// What is decided about a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fixed {
    Open,
    Keep,
    Again,
}

impl Problem {
    /// The values that are needed where these steps run again.
    fn needed(&self, again: &[bool]) -> Vec<bool> {
        let mut needed = vec![false; self.values.len()];
        let mut open: Vec<usize> = (0..self.values.len()).filter(|value| self.values[*value].read).collect();
        while let Some(value) = open.pop() {
            let step = self.values[value].step.filter(|step| again[*step]);
            if let (false, Some(step)) = (std::mem::replace(&mut needed[value], true), step) {
                open.extend(&self.steps[step].needs);
            }
        }
        needed
    }

    /// What a choice of steps keeps and costs. Steps that nothing needs do not run.
    pub(super) fn choice(&self, wanted: &[bool]) -> Choice {
        let mut choice = Choice { again: vec![false; self.steps.len()], bytes: 0, cost: 0 };
        let needed = self.needed(wanted);
        for (value, _) in self.values.iter().zip(needed).filter(|(_, needed)| *needed) {
            match value.step.filter(|step| wanted[*step]) {
                None => choice.bytes = choice.bytes.saturating_add(value.bytes),
                Some(step) if choice.again[step] => {}
                Some(step) => {
                    choice.again[step] = true;
                    choice.cost = choice.cost.saturating_add(self.steps[step].cost);
                }
            }
        }
        choice
    }

    /// The choice of the least cost whose kept bytes fit; if none fits, the one that keeps least.
    pub(super) fn choose(&self, budget: u64) -> Choice {
        let mut bounded = self.clone();
        bounded.values.iter_mut().for_each(|value| value.bytes = value.bytes.min(MOST));
        bounded.steps.iter_mut().for_each(|step| step.cost = step.cost.min(MOST));
        self.choice(&bounded.search(budget).again)
    }

    fn search(&self, budget: u64) -> Choice {
        let open = vec![Fixed::Open; self.steps.len()];
        let mut above = self.choice(&vec![false; self.steps.len()]);
        let cost: u64 = self.steps.iter().fold(1, |all, step| all.saturating_add(step.cost));
        let mut below = self.best((cost, 1), &open);
        if above.bytes <= budget {
            return above;
        }
        if below.bytes >= budget {
            return below;
        }
        // The price at which both choices are equally good is that of a better one between them, or the right one.
        let price = loop {
            let price = (below.cost - above.cost, above.bytes - below.bytes);
            let between = self.best(price, &open);
            if worth(&between, price) >= worth(&below, price) {
                break price;
            }
            if between.bytes <= budget {
                below = between;
            } else {
                above = between;
            }
        };
        let mut best = below.clone();
        let mut left = WORK / self.values.len().max(1);
        let mut branches = vec![open];
        while let (Some(mut fixed), true) = (branches.pop(), left > 0) {
            left -= 1;
            let found = self.best(price, &fixed);
            let least = worth(&found, price).saturating_sub(u128::from(price.0) * u128::from(budget));
            if found.bytes <= budget && found.cost < best.cost {
                best = found.clone();
            }
            // Costs are whole numbers, and only a smaller one is better.
            let Some(better) = best.cost.checked_sub(1) else { break };
            if least > u128::from(price.1) * u128::from(better) {
                continue;
            }
            // Where all steps that matter are decided, there is no other choice. First comes what the two choices decide
            // differently.
            let needed =
                self.needed(&found.again).into_iter().zip(&self.values).filter(|(needed, _)| *needed);
            let steps = needed.filter_map(|(_, value)| value.step).filter(|step| fixed[*step] == Fixed::Open);
            let differs = |step: &usize| above.again[*step] != below.again[*step];
            let Some(step) = steps.max_by_key(|step| (differs(step), self.steps[*step].cost)) else {
                continue;
            };
            // The branch of what the cut decides is looked at first: it is near the bound.
            let (first, second) =
                if found.again[step] { (Fixed::Again, Fixed::Keep) } else { (Fixed::Keep, Fixed::Again) };
            let mut other = fixed.clone();
            (fixed[step], other[step]) = (first, second);
            branches.extend([other, fixed]);
        }
        best
    }

    /// The choice of the least cost and price together: `price.0` for `price.1` bytes.
    fn best(&self, price: (u64, u64), fixed: &[Fixed]) -> Choice {
        let (values, steps) = (self.values.len(), self.steps.len());
        let (source, sink) = (values + steps, values + steps + 1);
        let mut cut = Cut::new(values + steps + 2);
        let keeps = |bytes: u64| u128::from(bytes) * u128::from(price.0);
        for (number, value) in self.values.iter().enumerate() {
            if value.read {
                cut.edge(source, number, ENDLESS);
            }
            let kept = value.step.is_none_or(|step| fixed[step] != Fixed::Again);
            let to = value.step.map_or(sink, |step| values + step);
            cut.edge(number, to, if kept { keeps(value.bytes) } else { ENDLESS });
        }
        for (number, step) in self.steps.iter().enumerate() {
            let cost = u128::from(step.cost) * u128::from(price.1);
            cut.edge(values + number, sink, if fixed[number] == Fixed::Keep { ENDLESS } else { cost });
            step.needs.iter().for_each(|value| cut.edge(values + number, *value, ENDLESS));
        }
        let near = cut.near(source, sink);
        let again: Vec<bool> = (0..steps).map(|step| near[values + step]).collect();
        self.choice(&again)
    }
}

/// Cost and price of a choice together.
fn worth(choice: &Choice, price: (u64, u64)) -> u128 {
    u128::from(choice.cost) * u128::from(price.1) + u128::from(choice.bytes) * u128::from(price.0)
}

/// The capacity of an edge that is never cut.
const ENDLESS: u128 = u128::MAX / 2;

/// A graph whose minimal cut is wanted, by Dinic's algorithm.
struct Cut {
    /// The target of each edge and what it can still carry; the edge back follows it.
    edges: Vec<(usize, u128)>,
    /// The edges that leave each node.
    from: Vec<Vec<usize>>,
}

impl Cut {
    fn new(nodes: usize) -> Cut {
        Cut { edges: Vec::new(), from: vec![Vec::new(); nodes] }
    }

    fn edge(&mut self, from: usize, to: usize, capacity: u128) {
        self.from[from].push(self.edges.len());
        self.edges.push((to, capacity));
        self.from[to].push(self.edges.len());
        self.edges.push((from, 0));
    }

    /// How many edges each node is away from the source, where something more can flow.
    fn levels(&self, source: usize) -> Vec<Option<usize>> {
        let mut levels = vec![None; self.from.len()];
        levels[source] = Some(0);
        let mut open = VecDeque::from([(source, 0)]);
        while let Some((node, level)) = open.pop_front() {
            for edge in &self.from[node] {
                let (to, left) = self.edges[*edge];
                if left > 0 && levels[to].is_none() {
                    levels[to] = Some(level + 1);
                    open.push_back((to, level + 1));
                }
            }
        }
        levels
    }

    /// The nodes on the source's side of the smallest minimal cut.
    fn near(mut self, source: usize, sink: usize) -> Vec<bool> {
        loop {
            let levels = self.levels(source);
            if levels[sink].is_none() {
                return levels.iter().map(Option::is_some).collect();
            }
            // The next edge that each node tries.
            let mut next = vec![0; self.from.len()];
            let mut path: Vec<usize> = Vec::new();
            loop {
                let node = path.last().map_or(source, |edge| self.edges[*edge].0);
                if node == sink {
                    let flow = path.iter().map(|edge| self.edges[*edge].1).min().unwrap_or(0);
                    for edge in path.drain(..) {
                        self.edges[edge].1 -= flow;
                        self.edges[edge ^ 1].1 += flow;
                    }
                    continue;
                }
                let Some(edge) = self.from[node].get(next[node]).copied() else {
                    // A dead end: the edge that leads here is not tried again.
                    let Some(back) = path.pop() else { break };
                    next[self.edges[back ^ 1].0] += 1;
                    continue;
                };
                let (to, left) = self.edges[edge];
                if left > 0 && levels[to] == levels[node].map(|level| level + 1) {
                    path.push(edge);
                } else {
                    next[node] += 1;
                }
            }
        }
    }
}

/// Bytes and cost of the choice of the least cost whose bytes fit, of all choices; if none fits, of one that keeps least.
#[cfg(test)]
pub(super) fn brute(problem: &Problem, budget: u64) -> (u64, u64) {
    let n = problem.steps.len();
    let all = (0..1u32 << n).map(|bits| {
        let again: Vec<bool> = (0..n).map(|i| bits >> i & 1 == 1).collect();
        let Choice { bytes, cost, .. } = problem.choice(&again);
        (bytes, cost)
    });
    let all: Vec<(u64, u64)> = all.collect();
    let fits = all.iter().filter(|(bytes, _)| *bytes <= budget).min_by_key(|(_, cost)| *cost);
    *fits.unwrap_or_else(|| all.iter().min().expect("there is the choice that keeps all"))
}

#[cfg(test)]
mod tests {
    use consort_types::Rng;

    use super::*;

    /// A random problem: values in the order in which they are computed, most with a step that needs earlier ones.
    fn problem(seed: u64) -> Problem {
        let mut rng = Rng::new(seed);
        let mut problem = Problem::default();
        for _ in 0..3 + rng.below(9) {
            let before = problem.values.len();
            let some = rng.below(3.min(before + 1));
            let needs = (0..some).map(|_| rng.below(before)).collect();
            let step = (!rng.one_in(5)).then(|| {
                problem.steps.push(Step { cost: rng.below(20) as u64, needs });
                problem.steps.len() - 1
            });
            for _ in 0..1 + usize::from(rng.one_in(4)) {
                let (bytes, read) = (rng.below(16) as u64, !rng.one_in(3));
                problem.values.push(Kept { bytes, step, read });
            }
        }
        problem
    }

    #[test]
    fn the_cost_is_the_least_of_all_choices() {
        let mut between = 0;
        for seed in 0..3000 {
            let problem = problem(seed);
            let all = problem.choice(&vec![false; problem.steps.len()]).bytes;
            for budget in [0, all / 4, all / 2, all * 3 / 4, all] {
                let choice = problem.choose(budget);
                assert_eq!(choice, problem.choice(&choice.again));
                let expected = brute(&problem, budget);
                if expected.0 > budget {
                    assert_eq!((choice.bytes, choice.cost), expected, "{problem:?} in {budget}");
                } else {
                    assert!(choice.bytes <= budget, "{choice:?} in {budget}");
                    assert_eq!(choice.cost, expected.1, "{problem:?} in {budget}");
                    between += usize::from(choice.cost > 0);
                }
            }
        }
        assert!(between > 3000, "{between}");
    }

    #[test]
    fn a_cut_is_the_best_choice_for_a_price() {
        for seed in 0..1000 {
            let problem = problem(seed);
            let n = problem.steps.len();
            let price = (1 + seed % 5, 1 + seed / 5 % 4);
            let fixed: Vec<Fixed> = (0..n)
                .map(|step| {
                    [Fixed::Open, Fixed::Open, Fixed::Keep, Fixed::Again][(seed as usize + step * 7) % 4]
                })
                .collect();
            let choices =
                (0..1u32 << n).map(|bits| (0..n).map(|i| bits >> i & 1 == 1).collect::<Vec<bool>>());
            let fits = |again: &Vec<bool>| {
                again.iter().zip(&fixed).all(|(again, fixed)| match fixed {
                    Fixed::Open => true,
                    Fixed::Keep => !again,
                    Fixed::Again => *again,
                })
            };
            let least = choices.filter(fits).map(|again| worth(&problem.choice(&again), price)).min();
            assert_eq!(Some(worth(&problem.best(price, &fixed), price)), least, "{problem:?}");
        }
    }

    /// Many layers, of which a budget keeps any: more choices than are looked at.
    #[test]
    fn a_large_problem_is_near_its_bound() {
        let mut problem = Problem::default();
        for layer in 0..500 {
            let needs: Vec<usize> = problem.values.len().checked_sub(1).into_iter().collect();
            problem.steps.push(Step { cost: 100 + layer % 7, needs });
            problem.values.push(Kept { bytes: 64 + layer % 5, step: Some(layer as usize), read: true });
        }
        let all = problem.choice(&[false; 500]).bytes;
        let choice = problem.choose(all / 2);
        assert!(choice.bytes <= all / 2);
        // No layer frees more than 68 bytes at less than 100, and the last one may free too much.
        let least = (all - all / 2) * 100 / 68;
        assert!(choice.cost >= least && choice.cost <= least * 112 / 100, "{} of {least}", choice.cost);
    }
}
