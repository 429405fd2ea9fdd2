//! The queries of requests, read strictly.

use std::collections::BTreeSet;
use std::time::Duration;

use mvm_proto::json::{nearest, quote};
use mvm_proto::object::{Kind, kind_named};
use mvm_proto::{Problem, TenantId};

use crate::refuse;

/// The longest that a request waits.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// What a list is asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ListQuery {
    pub(super) label_selector: String,
    pub(super) field_selector: String,
    pub(super) limit: u32,
    pub(super) continue_from: String,
    pub(super) watch: bool,
    pub(super) resource_version: String,
}

/// How one object is written or deleted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct OneQuery {
    pub(super) dry_run: bool,
    pub(super) force: bool,
    pub(super) wait: Option<Duration>,
}

/// Which events are asked for.
#[derive(Debug, Default)]
pub(super) struct EventsQuery {
    pub(super) object: Option<(&'static Kind, Option<TenantId>, String)>,
    pub(super) tenant: Option<String>,
}

/// A query as its names and values.
pub(super) trait Query: Default {
    const NAMES: &'static [&'static str];
    fn set(&mut self, name: &str, value: String) -> Result<(), String>;
}

pub(super) fn read<Q: Query>(text: Option<&str>) -> Result<Q, Problem> {
    let mut query = Q::default();
    let mut seen = BTreeSet::new();
    for (name, value) in form_urlencoded::parse(text.unwrap_or_default().as_bytes()) {
        if !Q::NAMES.contains(&name.as_ref()) {
            let near = nearest(&name, Q::NAMES.iter().copied());
            let near = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            let detail = format!("there is no query parameter {}{near}", quote(&name));
            return Err(Problem::new(
                400,
                "bad_request",
                detail,
                format!("It takes: {}.", Q::NAMES.join(", ")),
            ));
        }
        if !seen.insert(name.to_string()) {
            return Err(refuse::bad_request(format!("the query parameter {name} is there twice")));
        }
        let bad = |rule| refuse::bad_request(format!("the query parameter {name} {rule}"));
        query.set(&name, value.into_owned()).map_err(bad)?;
    }
    Ok(query)
}

impl Query for ListQuery {
    const NAMES: &'static [&'static str] =
        &["label_selector", "field_selector", "limit", "continue", "watch", "resource_version"];

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "label_selector" => self.label_selector = value,
            "field_selector" => self.field_selector = value,
            "limit" => self.limit = value.parse().map_err(|_| "must be a number".to_owned())?,
            "continue" => self.continue_from = value,
            "watch" => self.watch = truth(&value)?,
            _ => match value.as_str() {
                "" => {}
                text if text.parse::<u64>().is_ok() => self.resource_version = value,
                _ => return Err("must be a version that a list gave".to_owned()),
            },
        }
        Ok(())
    }
}

impl Query for OneQuery {
    const NAMES: &'static [&'static str] = &["dry_run", "force", "wait"];

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "dry_run" => self.dry_run = truth(&value)?,
            "force" => self.force = truth(&value)?,
            _ => self.wait = Some(duration(&value)?),
        }
        Ok(())
    }
}

impl Query for EventsQuery {
    const NAMES: &'static [&'static str] = &["object", "tenant"];

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "object" => self.object = Some(reference(&value)?),
            _ => self.tenant = Some(value),
        }
        Ok(())
    }
}

/// `pool/acme/workers`, `node/n1`.
fn reference(text: &str) -> Result<(&'static Kind, Option<TenantId>, String), String> {
    let form = || "must be KIND/TENANT/NAME, or KIND/NAME of kinds that belong to no tenant".to_owned();
    let steps: Vec<&str> = text.split('/').collect();
    let kind = kind_named(steps[0])?;
    match (kind.is_tenant_scoped(), &steps[1..]) {
        (true, [tenant, name]) => Ok((kind, Some(tenant.parse().map_err(|_| form())?), (*name).to_owned())),
        (false, [name]) => Ok((kind, None, (*name).to_owned())),
        _ => Err(form()),
    }
}

fn truth(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => Err("must be true or false".to_owned()),
    }
}

/// `30s`, `500ms`, `5m`.
fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: u64 = number.parse().map_err(|_| "must be a time like 30s".to_owned())?;
    let millis = match unit {
        "ms" => Some(number),
        "s" | "" => number.checked_mul(1000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => return Err("must be a time like 30s".to_owned()),
    };
    let wait = Duration::from_millis(millis.unwrap_or(u64::MAX));
    if wait <= MAX_WAIT { Ok(wait) } else { Err("must be at most 1h".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read_strictly() {
        let query: ListQuery = read(Some("label_selector=a%3Db&limit=5&watch=true")).unwrap();
        assert_eq!((query.label_selector.as_str(), query.limit, query.watch), ("a=b", 5, true));
        let query: OneQuery = read(Some("wait=500ms&dry_run=1")).unwrap();
        assert_eq!(query, OneQuery { dry_run: true, force: false, wait: Some(Duration::from_millis(500)) });
        for bad in [
            "wait=2h",
            "wait=x",
            "wait=18446744073709551615h",
            "dry_run=yes",
            "dryrun=true",
            "force=1&force=1",
        ] {
            assert!(read::<OneQuery>(Some(bad)).is_err(), "{bad}");
        }
        for bad in
            ["object=pool", "object=pool/web", "object=node/acme/n1", "object=cat/a", "object=pool/A%20B/web"]
        {
            assert!(read::<EventsQuery>(Some(bad)).is_err(), "{bad}");
        }
        let query: EventsQuery = read(Some("object=pl/acme/web")).unwrap();
        let (kind, tenant, name) = query.object.unwrap();
        assert_eq!((kind.name, tenant.unwrap().as_str(), name.as_str()), ("Pool", "acme", "web"));
        assert!(read::<OneQuery>(Some("dryrun=1")).unwrap_err().detail.contains("did you mean `dry_run`?"));
    }
}
