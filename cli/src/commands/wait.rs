//! `mvm wait`: until a condition holds, a field has a value, or an object is gone.

use std::str::FromStr;

use clap::Args;
use mvm_client::Name;
use mvm_proto::object::Object;
use serde_json::Value;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{ObjectArgs, failed, is_lines, table, tell};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  mvm wait pool/acme/workers --for condition=Ready --timeout 2m
  mvm wait pool acme/workers --for status.counts.running=3
  mvm wait node/n1 --for condition=Ready=False
  mvm wait tenant/acme --for delete

Exit code 3: --timeout (30s unless said otherwise) was over first.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WaitArgs {
    /// KIND/NAME... or KIND NAME...
    #[arg(required = true, value_name = "KIND/NAME")]
    objects: Vec<String>,
    /// condition=TYPE[=STATUS], delete, or FIELD=VALUE with the field's path
    #[arg(long = "for", value_name = "WHAT", required = true)]
    awaited: Awaited,
    #[command(flatten)]
    object: ObjectArgs,
}

/// What is waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Awaited {
    Condition { r#type: String, status: String },
    Field { path: String, value: String },
    Deleted,
}

impl FromStr for Awaited {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "delete" {
            return Ok(Self::Deleted);
        }
        if let Some(condition) = text.strip_prefix("condition=") {
            let (r#type, status) = condition.split_once('=').unwrap_or((condition, "True"));
            let known = ["True", "False", "Unknown"].iter().find(|known| known.eq_ignore_ascii_case(status));
            return match known {
                Some(status) if !r#type.is_empty() => {
                    Ok(Self::Condition { r#type: r#type.to_owned(), status: (*status).to_owned() })
                }
                _ => Err("use condition=TYPE, or condition=TYPE=True, =False or =Unknown".to_owned()),
            };
        }
        // As kubectl writes it: jsonpath='{.status.ready}'=3/3
        let field = text.strip_prefix("jsonpath=").unwrap_or(text);
        let parts = field.split_once('=').map(|(path, value)| {
            let path = path.trim().trim_start_matches('{').trim_end_matches('}').trim_start_matches('.');
            (path.to_owned(), value.to_owned())
        });
        match parts {
            Some((path, value))
                if ["metadata.", "spec.", "status."].iter().any(|it| path.starts_with(it)) =>
            {
                Ok(Self::Field { path, value })
            }
            _ => {
                Err("use condition=TYPE, delete, or FIELD=VALUE where FIELD begins with metadata., spec. or \
                      status."
                    .to_owned())
            }
        }
    }
}

impl Awaited {
    /// Whether it is so. What a condition says of an older spec does not count.
    fn holds(&self, object: Option<&Object>) -> bool {
        let Some(object) = object else { return *self == Self::Deleted };
        match self {
            Self::Deleted => false,
            Self::Condition { r#type, status } => {
                let observed = object.status.get("observed_generation").and_then(Value::as_u64);
                observed.is_none_or(|observed| observed >= object.metadata.generation)
                    && object.conditions().iter().any(|one| one.r#type == *r#type && one.status == *status)
            }
            Self::Field { path, value } => found(object, path) == *value,
        }
    }

    /// How it is instead.
    fn instead(&self, object: &Object) -> String {
        match self {
            Self::Deleted => match object.metadata.finalizers.as_slice() {
                [] => "it is still there".to_owned(),
                left => format!("it waits for {}", left.join(", ")),
            },
            Self::Field { path, .. } => format!("{path} is {}", output::or_dash(&found(object, path))),
            Self::Condition { r#type, .. } => {
                match object.conditions().iter().find(|one| one.r#type == *r#type) {
                    Some(one) => format!("{} is {}: {} {}", one.r#type, one.status, one.reason, one.message),
                    None => format!("it has no condition {type}"),
                }
            }
        }
    }
}

fn found(object: &Object, path: &str) -> String {
    let object = serde_json::to_value(object).unwrap_or_default();
    match table::at(&object, path) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

pub(crate) async fn run(global: &Global, args: WaitArgs) -> Run {
    let names = args.object.names(&args.objects)?;
    let objects = args.object.open(global).await?;
    let limit = tokio::time::Instant::now() + global.timeout();
    let mut ended = Vec::new();
    for name in &names {
        let mut last = None;
        let waiting = objects.wait_for(name, |object| {
            last = object.cloned();
            // What is not there won't have a condition, and is not waited for.
            object.is_none() || args.awaited.holds(object)
        });
        let Ok(answer) = tokio::time::timeout_at(limit, waiting).await else {
            return Err(Outcome::TimedOut(anyhow::anyhow!(too_late(
                global,
                name,
                &args.awaited,
                last.as_ref()
            ))));
        };
        let object = answer.map_err(failed)?;
        if !args.awaited.holds(object.as_ref()) {
            return Err(Outcome::Failed(anyhow::anyhow!("there is no {name}")));
        }
        let became = if args.awaited == Awaited::Deleted { "deleted" } else { "condition met" };
        tell(global.output, name, became)?;
        ended.extend(object);
    }
    if !is_lines(global.output) {
        output::show(global.output, &ended, |_| output::plain())?;
    }
    Ok(())
}

fn too_late(global: &Global, name: &Name, awaited: &Awaited, last: Option<&Object>) -> String {
    let instead = last.map(|object| format!(": {}", awaited.instead(object))).unwrap_or_default();
    format!("gave up on {name} after {}{instead}", humantime::format_duration(global.timeout()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(status: &Value) -> Object {
        serde_json::from_value(json!({ "api_version": "mvm/v1", "kind": "Pool",
            "metadata": { "name": "a", "tenant": "t", "generation": 2 }, "spec": {}, "status": status }))
        .unwrap()
    }

    fn ready(observed: u64, status: &str) -> Object {
        let condition =
            json!({ "type": "Ready", "status": status, "reason": "R", "message": "m", "since": "" });
        object(
            &json!({ "observed_generation": observed, "conditions": [condition], "counts": { "running": 3 } }),
        )
    }

    #[test]
    fn what_is_waited_for_is_written_as_for_kubectl_or_as_a_path() {
        let field =
            |path: &str, value: &str| Awaited::Field { path: path.to_owned(), value: value.to_owned() };
        let condition =
            |status: &str| Awaited::Condition { r#type: "Ready".to_owned(), status: status.to_owned() };
        for (text, meant) in [
            ("delete", Awaited::Deleted),
            ("condition=Ready", condition("True")),
            ("condition=Ready=false", condition("False")),
            ("status.counts.running=3", field("status.counts.running", "3")),
            ("jsonpath={.status.ready}=3/3", field("status.ready", "3/3")),
        ] {
            assert_eq!(text.parse(), Ok(meant), "{text}");
        }
        for bad in ["ready", "condition=", "condition=Ready=maybe", "counts=3", "status.ready"] {
            assert!(bad.parse::<Awaited>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_condition_about_an_older_spec_does_not_count() {
        let awaited: Awaited = "condition=Ready".parse().unwrap();
        assert!(awaited.holds(Some(&ready(2, "True"))));
        assert!(!awaited.holds(Some(&ready(1, "True"))));
        assert!(!awaited.holds(Some(&ready(2, "False"))));
        assert!(!awaited.holds(None));
        assert_eq!(awaited.instead(&ready(2, "False")), "Ready is False: R m");
        let field: Awaited = "status.counts.running=3".parse().unwrap();
        assert!(field.holds(Some(&ready(1, "False"))));
        assert!(Awaited::Deleted.holds(None) && !Awaited::Deleted.holds(Some(&ready(1, "True"))));
    }
}
