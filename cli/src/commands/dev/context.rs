//! The context of a development cluster in its user's file of contexts: `dev`, or `dev-2` where another cluster has that name.

use std::path::Path;

use crate::contexts::{self, Context, Contexts};
use crate::progress::Progress;

/// Also the name of its tenant.
pub(super) const NAME: &str = "dev";

/// Variables that beat what a context says.
const BEATS_IT: [&str; 4] = ["MVM_CONTEXT", "MVM_COORDINATOR", "MVM_OPERATOR_DIR", "MVM_ENDPOINT"];

/// What a user has to know to call the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) is_current: bool,
}

/// Writes the context, under the name that it had before if any. None: this user has no place for contexts.
pub(super) fn write(
    url: &str,
    operator_dir: &Path,
    socket: &Path,
    before: Option<&str>,
) -> anyhow::Result<Option<Named>> {
    let Some(file) = contexts::file() else { return Ok(None) };
    let context = Context {
        coordinator: Some(url.to_owned()),
        operator_dir: Some(operator_dir.to_owned()),
        tenant: NAME.parse().ok(),
        node_endpoint: Some(format!("unix:{}", socket.display())),
    };
    Contexts::change(&file, |contexts| Ok(add(contexts, context, before, Path::exists))).map(Some)
}

/// Forgets the context, if it still is that of this cluster. Whether it was the current one.
pub(super) fn forget(name: &str, operator_dir: &Path) -> anyhow::Result<Option<bool>> {
    let Some(file) = contexts::file() else { return Ok(None) };
    Contexts::change(&file, |contexts| Ok(remove(contexts, name, operator_dir)))
}

/// Whether the context is there and of this cluster, and whether it is the current one.
pub(super) fn look(name: &str, operator_dir: &Path) -> anyhow::Result<Option<Named>> {
    let Some(file) = contexts::file() else { return Ok(None) };
    let contexts = Contexts::load(&file)?;
    let is_ours = contexts.contexts.get(name).is_some_and(|context| is_of(context, operator_dir));
    let is_current = contexts.current.as_deref() == Some(name);
    Ok(is_ours.then(|| Named { name: name.to_owned(), is_current }))
}

/// Says how commands find the cluster, and what keeps them from it.
pub(super) fn tell(named: Option<&Named>, progress: Progress) {
    match named {
        Some(Named { name, is_current: true }) => progress.say(format!("context {name} is the current one")),
        Some(Named { name, .. }) => progress.say(format!(
            "context {name}: another one is current, so give commands --context {name}, or: mvm context use {name}"
        )),
        None => progress.say("no context was written: neither HOME, XDG_CONFIG_HOME nor MVM_CONTEXTS is set"),
    }
    for name in BEATS_IT {
        if std::env::var_os(name).is_some_and(|value| !value.is_empty()) {
            progress.say(format!("{name} is set and beats the context; to use the context: unset {name}"));
        }
    }
}

fn is_of(context: &Context, operator_dir: &Path) -> bool {
    context.operator_dir.as_deref() == Some(operator_dir)
}

/// A name whose context is of another cluster is taken for as long as that cluster's directory is there.
fn add(
    contexts: &mut Contexts,
    context: Context,
    before: Option<&str>,
    exists: impl Fn(&Path) -> bool,
) -> Named {
    let operator_dir = context.operator_dir.clone().unwrap_or_default();
    let names = before.map(str::to_owned).into_iter().chain([NAME.to_owned()]);
    let mut names = names.chain((2..).map(|number| format!("{NAME}-{number}")));
    let is_taken = |name: &String| {
        let other = contexts.contexts.get(name).filter(|context| !is_of(context, &operator_dir));
        other.is_some_and(|other| other.operator_dir.as_deref().is_none_or(&exists))
    };
    // There are more names than contexts.
    let name = names.find(|name| !is_taken(name)).unwrap_or_default();
    contexts.contexts.insert(name.clone(), context);
    let is_current = *contexts.current.get_or_insert_with(|| name.clone()) == name;
    Named { name, is_current }
}

fn remove(contexts: &mut Contexts, name: &str, operator_dir: &Path) -> Option<bool> {
    contexts.contexts.get(name).filter(|context| is_of(context, operator_dir))?;
    contexts.contexts.remove(name);
    let was_current = contexts.current.as_deref() == Some(name);
    if was_current {
        contexts.current = None;
    }
    Some(was_current)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(dir: &str) -> Context {
        Context { operator_dir: Some(dir.into()), ..Context::default() }
    }

    fn named(name: &str, is_current: bool) -> Named {
        Named { name: name.to_owned(), is_current }
    }

    #[test]
    fn the_context_is_current_only_where_no_other_is_and_goes_with_its_cluster() {
        let mut contexts = Contexts::default();
        assert_eq!(add(&mut contexts, context("/a"), None, |_| true), named("dev", true));
        assert_eq!(add(&mut contexts, context("/a"), Some("dev"), |_| true), named("dev", true));
        assert_eq!(remove(&mut contexts, "dev", Path::new("/b")), None);
        assert_eq!(remove(&mut contexts, "dev", Path::new("/a")), Some(true));
        assert_eq!(contexts, Contexts::default());

        contexts.contexts.insert("prod".to_owned(), context("/prod"));
        contexts.current = Some("prod".to_owned());
        assert_eq!(add(&mut contexts, context("/a"), None, |_| true), named("dev", false));
        assert_eq!(remove(&mut contexts, "dev", Path::new("/a")), Some(false));
        assert_eq!(contexts.current.as_deref(), Some("prod"));
    }

    #[test]
    fn a_name_that_another_cluster_has_stays_its_own_and_one_of_a_cluster_that_is_gone_is_taken() {
        let mut contexts = Contexts::default();
        add(&mut contexts, context("/a"), None, |_| true);
        assert_eq!(add(&mut contexts, context("/b"), None, |_| true), named("dev-2", false));
        assert_eq!(add(&mut contexts, context("/b"), Some("dev-2"), |_| true), named("dev-2", false));
        assert_eq!(add(&mut contexts, context("/c"), None, |dir| dir != Path::new("/b")).name, "dev-2");
        // One by hand, that says no directory.
        contexts.contexts.insert("dev".to_owned(), Context::default());
        assert_eq!(add(&mut contexts, context("/d"), None, |dir| dir != Path::new("/c")).name, "dev-2");
    }
}
