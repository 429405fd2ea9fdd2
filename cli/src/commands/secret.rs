//! `mvm secret set`: changes values of a Secret one by one, from files and standard input, so that none need be in a command line
//! or in a file of objects.

use std::io::Read as _;

use anyhow::{Context as _, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Args, Subcommand};
use mvm_client::{ApplyOptions, Name, Objects};
use mvm_proto::object::{API_VERSION, MAX_SECRET_BYTES, kind_named};
use serde_json::{Value, json};

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::names::of_kind;
use crate::objects::{ATTEMPTS, ObjectArgs, editable, is_stale, tell, within};

const EXAMPLES: &str = "\
Examples:
  mvm secret set acme/db PASSWORD=@password.txt tls.key=@server.key
  pass show db | mvm secret set acme/db PASSWORD=-
  mvm secret set acme/db --remove OLD
  mvm secret set acme/db MODE=test     the value stands in the shell's history

The Secret is made where there is none; its other values stay. A file is taken as it is, with the line feed at its end.";

#[derive(Debug, Subcommand)]
pub(crate) enum SecretCommand {
    /// Set or remove values
    Set(SetArgs),
}

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SetArgs {
    /// TENANT/NAME, or NAME with -t or a context's tenant
    #[arg(value_name = "SECRET")]
    secret: String,
    /// NAME=@FILE, NAME=- for standard input, or NAME=VALUE
    #[arg(value_name = "NAME=VALUE", required_unless_present = "remove")]
    values: Vec<String>,
    /// Value to take away
    #[arg(long, value_name = "NAME")]
    remove: Vec<String>,
    /// Do everything but the writing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, command: SecretCommand) -> Run {
    let SecretCommand::Set(args) = command;
    let usage = |error: String| Outcome::Usage(anyhow!(error));
    let kind = kind_named("secrets").map_err(usage)?;
    let word = args.secret.strip_prefix("secret/").unwrap_or(&args.secret);
    let name = of_kind(kind, word, args.object.tenant()).map_err(usage)?;
    if args.values.iter().filter(|value| value.ends_with("=-")).count() > 1 {
        return Err(usage("standard input is one value; name it once".to_owned()));
    }
    let values = args.values.iter().map(|text| value(text).map_err(Outcome::Usage));
    let values = values.collect::<Result<Vec<_>, _>>()?;
    let mut objects = args.object.open(global).await?;
    let outcome = set(global, &mut objects, &name, &values, &args).await?;
    tell(global.output, &name, &crate::commands::apply::marked(&outcome, args.dry_run))?;
    Ok(())
}

/// What others write to the Secret meanwhile is kept.
async fn set(
    global: &Global,
    objects: &mut Objects,
    name: &Name,
    values: &[(String, Value)],
    args: &SetArgs,
) -> Result<String, Outcome> {
    let options = ApplyOptions { dry_run: args.dry_run, create_only: false };
    let mut attempt = 1;
    loop {
        let found = within(global.timeout(), objects.find(name)).await?;
        let mut next = found.map_or_else(
            || {
                json!({ "api_version": API_VERSION, "kind": name.kind.name,
                    "metadata": { "name": name.name, "tenant": name.tenant }, "spec": { "data": {} } })
            },
            |found| editable(&found, true),
        );
        let data = &mut next["spec"]["data"];
        for (name, value) in values {
            data[name] = value.clone();
        }
        if let Value::Object(data) = data {
            data.retain(|name, _| !args.remove.contains(name));
        }
        let applying = async { Ok(objects.apply(&next, options).await) };
        match within(global.timeout(), applying).await? {
            Ok(applied) => return Ok(applied.outcome.as_str().to_owned()),
            Err(error) if attempt < ATTEMPTS && is_stale(&error) => attempt += 1,
            Err(error) => return Err(crate::objects::failed(error)),
        }
    }
}

/// `NAME=@FILE`, `NAME=-`, `NAME=VALUE`: the name, and the value as an object has it. No error repeats a value.
fn value(text: &str) -> anyhow::Result<(String, Value)> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| anyhow!("write NAME=@FILE, NAME=- or NAME=VALUE"))?;
    let bytes = match value.strip_prefix('@') {
        Some(path) => {
            let file = std::fs::File::open(path).with_context(|| format!("could not open {path}"))?;
            limited(file).with_context(|| format!("could not read {path}"))?
        }
        None if value == "-" => limited(std::io::stdin().lock()).context("could not read standard input")?,
        None => value.as_bytes().to_vec(),
    };
    let value = match String::from_utf8(bytes) {
        Ok(text) => Value::String(text),
        Err(error) => json!({ "base64": STANDARD.encode(error.as_bytes()) }),
    };
    Ok((name.to_owned(), value))
}

fn limited(source: impl std::io::Read) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One more than is taken: that it is too much is told here.
    source.take(MAX_SECRET_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_SECRET_BYTES {
        return Err(anyhow!("it has more than {MAX_SECRET_BYTES} bytes"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_from_words_and_files_and_what_is_no_text_as_base64() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, [0, 255]).unwrap();
        let of_file = format!("k=@{}", path.display());
        assert_eq!(value("A=b=c").unwrap(), ("A".to_owned(), json!("b=c")));
        assert_eq!(value("A=").unwrap(), ("A".to_owned(), json!("")));
        assert_eq!(value(&of_file).unwrap(), ("k".to_owned(), json!({ "base64": "AP8=" })));
        std::fs::write(&path, "text\n").unwrap();
        assert_eq!(value(&of_file).unwrap().1, json!("text\n"));
        std::fs::write(&path, vec![b'x'; MAX_SECRET_BYTES + 1]).unwrap();
        assert!(format!("{:#}", value(&of_file).unwrap_err()).contains("more than"));
        let error = format!("{:#}", value("hunter2").unwrap_err());
        assert!(!error.contains("hunter2"), "{error}");
    }
}
