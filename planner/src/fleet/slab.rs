//! Small numbers for what has a name, and tables by number: what a decision touches is found by an index instead of by a
//! search among names, so that it costs the same however much there is. Names are looked up where they come in.

use std::marker::PhantomData;

/// Stands for a thing as long as that is there; then another may get it. Says nothing of any order.
pub(super) trait Number: Copy {
    fn of(at: usize) -> Self;
    fn at(self) -> usize;
}

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) struct $name(u32);

        impl Number for $name {
            fn of(at: usize) -> Self {
                Self(u32::try_from(at).unwrap_or(u32::MAX))
            }

            fn at(self) -> usize {
                usize::try_from(self.0).unwrap_or(usize::MAX)
            }
        }
    )*};
}

numbers!(
    NodeNumber,
    TenantNumber,
    PoolNumber,
    /// Of nodes with equal labels and taints.
    ClassNumber,
    /// Of nodes of one class: all of them, or those with an image.
    RankingNumber
);

/// Things by their numbers.
#[derive(Debug, Clone)]
pub(super) struct Slab<N, T> {
    entries: Vec<Option<T>>,
    unused: Vec<usize>,
    numbers: PhantomData<N>,
}

impl<N, T> Default for Slab<N, T> {
    fn default() -> Self {
        Self { entries: Vec::new(), unused: Vec::new(), numbers: PhantomData }
    }
}

impl<N: Number, T> Slab<N, T> {
    pub(super) fn insert(&mut self, thing: T) -> N {
        let at = self.unused.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[at] = Some(thing);
        N::of(at)
    }

    pub(super) fn remove(&mut self, number: N) -> Option<T> {
        let thing = self.entries.get_mut(number.at())?.take();
        if thing.is_some() {
            self.unused.push(number.at());
        }
        thing
    }

    pub(super) fn get(&self, number: N) -> Option<&T> {
        self.entries.get(number.at())?.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: N) -> Option<&mut T> {
        self.entries.get_mut(number.at())?.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (N, &T)> {
        self.entries.iter().enumerate().filter_map(|(at, thing)| Some((N::of(at), thing.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_given_again_once_what_had_it_is_gone() {
        let mut slab = Slab::<PoolNumber, &str>::default();
        let (a, b) = (slab.insert("a"), slab.insert("b"));
        assert_eq!((slab.remove(a), slab.remove(a), slab.get(a)), (Some("a"), None, None));
        let c = slab.insert("c");
        assert_eq!((c, slab.get(c), slab.get(b)), (a, Some(&"c"), Some(&"b")));
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(a, &"c"), (b, &"b")]);
        assert_ne!(slab.insert("d"), b);
    }
}
