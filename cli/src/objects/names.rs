//! `pool/acme/workers`, `pool workers -t acme`, `pools,tenants`: which objects a command's words mean.

use mvm_client::Name;
use mvm_proto::id;
use mvm_proto::object::{Kind, kind_named};

/// Kinds to list, or objects to look at; never both.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    pub(crate) kinds: Vec<&'static Kind>,
    pub(crate) names: Vec<Name>,
}

/// Reads the words after `get`, `describe`, `delete`: `KIND[,KIND]`, `KIND[,KIND] NAME...` or `KIND/NAME...`. `tenant` is
/// the one of names that name none.
pub(crate) fn parse(words: &[String], tenant: Option<&str>) -> Result<Targets, String> {
    let Some((first, rest)) = words.split_first() else { return Err("name a kind, or KIND/NAME".to_owned()) };
    if first.contains('/') {
        let names = words.iter().map(|word| with_kind(word, tenant)).collect::<Result<_, _>>()?;
        return Ok(Targets { names, ..Targets::default() });
    }
    let kinds = first.split(',').filter(|kind| !kind.is_empty()).map(kind).collect::<Result<Vec<_>, _>>()?;
    if rest.is_empty() {
        return Ok(Targets { kinds, ..Targets::default() });
    }
    let pairs = kinds.iter().flat_map(|kind| rest.iter().map(move |name| (*kind, name)));
    let names = pairs.map(|(kind, name)| of_kind(kind, name, tenant)).collect::<Result<_, _>>()?;
    Ok(Targets { names, ..Targets::default() })
}

fn kind(text: &str) -> Result<&'static Kind, String> {
    kind_named(text).map_err(|error| format!("{text:?}: {error}"))
}

fn with_kind(word: &str, tenant: Option<&str>) -> Result<Name, String> {
    let (kind, name) =
        word.split_once('/').ok_or_else(|| format!("{word:?}: with KIND/NAME all names are KIND/NAME"))?;
    of_kind(self::kind(kind)?, name, tenant)
}

/// `NAME`, or `TENANT/NAME` of kinds that belong to a tenant.
pub(crate) fn of_kind(kind: &'static Kind, text: &str, tenant: Option<&str>) -> Result<Name, String> {
    let (named, name) = match text.split_once('/') {
        Some((tenant, name)) => (Some(tenant), name),
        None => (None, text),
    };
    for part in named.iter().chain([&name]) {
        id::check_name(part).map_err(|rule| format!("{text:?}: the name {rule}"))?;
    }
    if !kind.is_tenant_scoped() {
        return match named {
            None => Ok(Name::of(kind, None, name)),
            Some(_) => Err(format!("{text:?}: {} belong to no tenant; write NAME alone", kind.plural)),
        };
    }
    match named.or(tenant) {
        Some(tenant) => Ok(Name::of(kind, Some(tenant), name)),
        None => Err(format!(
            "{text:?}: {} belong to a tenant; write TENANT/{name}, or name the tenant with -t or in a context",
            kind.plural
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &str, tenant: Option<&str>) -> Result<String, String> {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let Targets { kinds, names } = parse(&words, tenant)?;
        let kinds = kinds.iter().map(|kind| kind.plural.to_owned());
        Ok(kinds.chain(names.iter().map(ToString::to_string)).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn names_are_written_in_every_way_that_kubectl_takes_and_with_their_tenant() {
        let acme = Some("acme");
        for (words, tenant, meant) in [
            ("pools", None, "pools"),
            ("po,tn", None, "\"po\": there is no such kind"),
            ("pl,tn", None, "pools tenants"),
            ("pool/acme/workers", None, "pool/acme/workers"),
            ("pool/workers tn/acme", acme, "pool/acme/workers tenant/acme"),
            ("pl workers", acme, "pool/acme/workers"),
            ("pool acme/workers other/x", acme, "pool/acme/workers pool/other/x"),
            ("nodes n1 n2", acme, "node/n1 node/n2"),
        ] {
            let found = read(words, tenant);
            let found = found.unwrap_or_else(|error| error);
            assert!(found == meant || found.starts_with(meant), "{words}: {found}");
        }
    }

    #[test]
    fn what_can_not_be_meant_is_refused_with_what_to_write() {
        for (words, told) in [
            ("pool workers", "write TENANT/workers"),
            ("pool/workers", "write TENANT/workers"),
            ("node/acme/n1", "nodes belong to no tenant"),
            ("pool/acme/a/b", "the name must be"),
            ("pool/acme/A", "the name must be"),
            ("pool/acme/a workers", "all names are KIND/NAME"),
            ("pols", "did you mean pools?"),
        ] {
            let error = read(words, None).unwrap_err();
            assert!(error.contains(told), "{words}: {error}");
        }
    }
}
