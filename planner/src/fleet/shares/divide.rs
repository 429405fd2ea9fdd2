//! One quota, divided among nodes.

/// A node, as far as this quota goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Line {
    /// What is placed there.
    pub(super) need: u64,
    /// What it may use beyond that for a while.
    pub(super) burst: u64,
    /// The most that it may follow.
    pub(super) held: u64,
    /// What its document says now.
    pub(super) offered: u64,
    pub(super) away: bool,
}

/// What a node should have, and the range around it that is as good, so that its document need not change.
#[derive(Debug, Clone, Copy)]
struct Aim {
    base: u64,
    target: u64,
    low: u64,
    high: u64,
}

impl Aim {
    fn new(base: u64, lease: u64, most: u64) -> Self {
        let upto = |amount: u64| base.saturating_add(amount).min(most.max(base));
        Self { base, target: upto(lease), low: upto(lease.div_ceil(2)), high: upto(lease.saturating_mul(2)) }
    }
}

/// What each node gets.
#[derive(Debug)]
pub(super) struct Divided {
    pub(super) shares: Vec<u64>,
    /// Some node is to have more as soon as others acknowledged less.
    pub(super) waiting: bool,
}

/// The new share of each node; none is more than `most`.
///
/// For each node the larger of what it may follow and its new share counts; the sum is at most `quota`, or at most what
/// it was before if a quota was lowered. The targets of all nodes together are at most the quota, so repeating this while
/// nodes acknowledge ends with every node at or about its target.
pub(super) fn divide(quota: u64, most: u64, lines: &[Line]) -> Divided {
    let aims = aims(quota, most, lines);
    let mut shares: Vec<u64> = lines.iter().map(|line| line.offered).collect();
    let rises = |at: usize| !lines[at].away && lines[at].offered < aims[at].low;
    for (at, share) in shares.iter_mut().enumerate() {
        if *share > aims[at].high {
            *share = aims[at].target;
        }
        if rises(at) {
            // What it may follow already is counted already.
            *share = (*share).max(aims[at].target.min(lines[at].held));
        }
    }
    let held: i128 = lines.iter().map(|line| i128::from(line.held)).sum();
    let mut free = i128::from(quota) - held;
    let mut take = |amount: u64, all_or_none: bool| {
        let given = u64::try_from(free.clamp(0, i128::from(amount))).unwrap_or(0);
        let given = if all_or_none && given < amount { 0 } else { given };
        free -= i128::from(given);
        given
    };
    // What is placed comes before any lease.
    for at in (0..lines.len()).filter(|at| rises(*at)) {
        shares[at] += take(aims[at].base.saturating_sub(shares[at]), false);
    }
    for at in (0..lines.len()).filter(|at| rises(*at)) {
        shares[at] += take(aims[at].target.saturating_sub(shares[at]), true);
    }
    let lacking: i128 = (0..lines.len())
        .filter(|at| rises(*at))
        .map(|at| i128::from(aims[at].target.saturating_sub(shares[at])))
        .sum();
    take_back(lacking - free, lines, &aims, &mut shares);
    Divided { shares, waiting: lacking > 0 }
}

/// Lowers the shares that are farthest above their targets, until what nodes will give back is enough.
fn take_back(lacking: i128, lines: &[Line], aims: &[Aim], shares: &mut [u64]) {
    let present = || (0..lines.len()).filter(|at| !lines[*at].away);
    let coming = |at: usize, share: u64| i128::from(lines[at].held.saturating_sub(share));
    let mut missing = lacking - present().map(|at| coming(at, shares[at])).sum::<i128>();
    let mut above: Vec<usize> = present().filter(|at| shares[*at] > aims[*at].target).collect();
    above.sort_by_key(|at| (std::cmp::Reverse(shares[*at] - aims[*at].target), *at));
    for at in above {
        if missing <= 0 {
            return;
        }
        missing -= coming(at, aims[at].target) - coming(at, shares[at]);
        shares[at] = aims[at].target;
    }
}

fn aims(quota: u64, most: u64, lines: &[Line]) -> Vec<Aim> {
    let away = lines.iter().filter(|line| line.away).fold(0u64, |sum, line| sum.saturating_add(line.held));
    let mut left = quota.saturating_sub(away);
    let base_of = |line: &Line| {
        if line.away {
            return line.need;
        }
        let base = line.need.min(left);
        left -= base;
        base
    };
    let bases: Vec<u64> = lines.iter().map(base_of).collect();
    let eager = lines.iter().zip(&bases).filter(|(line, base)| is_eager(line, **base)).count();
    let fair = power_of_two_below(left.checked_div(eager as u64).unwrap_or(0));
    let lease = |line: &Line, base: u64| {
        if line.away || is_eager(line, base) { line.burst.min(fair) } else { 0 }
    };
    lines.iter().zip(bases).map(|(line, base)| Aim::new(base, lease(line, base), most)).collect()
}

/// Whether a node has what it needs and wants a lease as well.
fn is_eager(line: &Line, base: u64) -> bool {
    !line.away && line.burst > 0 && base == line.need
}

/// So that what all nodes get does not change with every instance that one of them gets.
fn power_of_two_below(amount: u64) -> u64 {
    amount.checked_ilog2().map_or(0, |log| 1 << log)
}
