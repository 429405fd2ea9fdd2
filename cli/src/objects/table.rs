//! Objects as rows: the columns of their kind, values by their paths.

use mvm_proto::Timestamp;
use mvm_proto::object::{Column, Kind, Object};
use serde_json::Value;

use crate::output::{self, Table, span};

/// A table of objects of one kind.
pub(crate) fn table(
    kind: &Kind,
    objects: &[&Object],
    with_tenant: bool,
    wide: bool,
    now: Timestamp,
) -> Table {
    let columns = || kind.columns.iter().filter(move |column| wide || !column.wide);
    let with_tenant = with_tenant && kind.is_tenant_scoped();
    let own_status = kind.columns.iter().any(|column| column.title == STATUS);
    let mut headings = vec!["NAME"];
    if with_tenant {
        headings.insert(0, "TENANT");
    }
    if !own_status {
        headings.push(STATUS);
    }
    headings.extend(columns().map(|column| column.title));
    headings.push("AGE");
    let mut table = output::plain();
    table.set_header(headings);
    for object in objects {
        let value = serde_json::to_value(object).unwrap_or_default();
        let mut row = Vec::new();
        if with_tenant {
            row.push(object.metadata.tenant.as_ref().map(ToString::to_string).unwrap_or_default());
        }
        row.push(object.metadata.name.clone());
        if !own_status {
            row.push(status(object));
        }
        row.extend(columns().map(|column| cell(object, &value, column)));
        row.push(age(object, now));
        table.add_row(row);
    }
    table.drop_empty(&[STATUS]);
    table
}

const STATUS: &str = "STATUS";

/// `Deleting`, else as its condition `Ready` says; nothing of objects that have none.
pub(crate) fn status(object: &Object) -> String {
    if object.metadata.deleting_since.is_some() {
        return "Deleting".to_owned();
    }
    let ready = object.conditions().into_iter().find(|condition| condition.r#type == "Ready");
    match ready {
        None => "-".to_owned(),
        Some(ready) if ready.status == "True" => "Ready".to_owned(),
        Some(ready) if ready.reason.is_empty() => "NotReady".to_owned(),
        Some(ready) => ready.reason,
    }
}

fn cell(object: &Object, value: &Value, column: &Column) -> String {
    if column.title == STATUS && object.metadata.deleting_since.is_some() {
        return status(object);
    }
    at(value, column.path).map_or_else(|| "-".to_owned(), shown)
}

/// The value at a path of names: `status.counts.running`.
pub(crate) fn at<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    path.split('.').try_fold(value, |value, step| value.get(step))
}

/// Of a list, how long it is.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => output::or_dash(text),
        Value::Array(items) => items.len().to_string(),
        Value::Object(fields) => fields.len().to_string(),
        other => other.to_string(),
    }
}

fn age(object: &Object, now: Timestamp) -> String {
    object.metadata.created_at.map_or_else(|| "-".to_owned(), |at| span(now.since(at)))
}

#[cfg(test)]
mod tests {
    use mvm_proto::object::kind_named;
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        serde_json::from_value(value).unwrap()
    }

    fn pool(tenant: &str, name: &str, status: &Value) -> Object {
        object(json!({
            "api_version": "mvm/v1", "kind": "Pool",
            "metadata": { "tenant": tenant, "name": name, "created_at": "2026-01-31T09:30:00Z" },
            "spec": { "image": { "ref": "builtin:busybox" }, "resources": { "vcpus": 1, "mem_mib": 64 } },
            "status": status,
        }))
    }

    fn shown_table(kind: &str, objects: &[Object], with_tenant: bool, wide: bool) -> String {
        let objects: Vec<_> = objects.iter().collect();
        let now = "2026-01-31T10:30:00Z".parse().unwrap();
        table(kind_named(kind).unwrap(), &objects, with_tenant, wide, now).render()
    }

    #[test]
    fn a_kind_s_columns_are_looked_up_by_their_paths_and_aligned() {
        let placed = json!({
            "ready": "3/4", "counts": { "running": 3, "warm": 1, "sleeping": 0 },
            "placed": [{ "node": "n1" }, { "node": "n2" }],
            "unplaced": { "counts": { "running": 1 }, "reason": "full" },
            "conditions": [{ "type": "Ready", "status": "False", "reason": "Unplaced", "message": "", "since": "" }],
        });
        let mut gone = pool("globex", "w", &Value::Null);
        gone.metadata.deleting_since = Some("2026-01-31T10:00:00Z".parse().unwrap());
        let pools = [pool("acme", "workers", &placed), gone];
        let expected = "\
TENANT  NAME     STATUS    READY  WARM  SLEEPING  NODES  UNPLACED  AGE
acme    workers  Unplaced  3/4    1     0         2      1         60m
globex  w        Deleting  -      -     -         -      -         60m
";
        assert_eq!(shown_table("pools", &pools, true, false), expected);
        let wide = shown_table("pools", &pools[..1], false, true);
        assert!(wide.lines().next().unwrap().contains("IMAGE") && wide.contains("builtin:busybox"), "{wide}");
        assert!(!wide.contains("TENANT"), "{wide}");
    }

    #[test]
    fn a_status_column_of_the_kind_is_used_and_an_empty_one_left_out() {
        let node = object(json!({ "api_version": "mvm/v1", "kind": "Node", "metadata": { "name": "n1" },
            "spec": { "cordoned": true }, "status": { "state": "Ready", "capacity": { "vcpus": 8 } } }));
        let shown = shown_table("nodes", &[node], true, false);
        assert_eq!(shown.matches("STATUS").count(), 1, "{shown}");
        assert!(shown.contains("Ready") && shown.contains("true") && !shown.contains("TENANT"), "{shown}");
        let key = object(json!({ "api_version": "mvm/v1", "kind": "ApiKey", "metadata": { "name": "ci" },
            "spec": { "role": "viewer" } }));
        assert!(!shown_table("api-keys", &[key], true, false).contains("STATUS"));
    }
}
