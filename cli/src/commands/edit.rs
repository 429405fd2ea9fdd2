//! `mvm edit`: an object in the user's editor, again and again until it is accepted or left as it was.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use mvm_client::files::{Tenant, read_text};
use mvm_client::{Applied, ApplyOptions, CallError, Name, Objects};
use mvm_proto::object::Object;
use serde_json::{Value, json};

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{ATTEMPTS, ObjectArgs, editable, is_stale, tell, within};
use crate::output;
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  mvm edit pool acme/workers
  EDITOR=nano mvm edit node/n1

The editor is $VISUAL, else $EDITOR, else vi. A text that is refused is opened again with the errors as comments; one that is
left as it was changes nothing.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EditArgs {
    /// KIND/NAME or KIND NAME
    #[arg(required = true, num_args = 1..=2, value_name = "KIND/NAME")]
    object_name: Vec<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: EditArgs) -> Run {
    let names = args.object.names(&args.object_name)?;
    let [name] = names.as_slice() else {
        return Err(Outcome::Usage(anyhow!("one object is edited at a time")));
    };
    let mut objects = args.object.open(global).await?;
    let object = within(global.timeout(), objects.get(name)).await?;
    let original = output::yaml(&editable(&object, true))?;
    let file = Scratch::create(name)?;
    let mut text = headed(name, &[], &original);
    loop {
        file.write(&text)?;
        open_editor(&file.path).await?;
        let edited = file.read()?;
        let bare = without_comments(&edited);
        if bare.trim().is_empty() || bare == without_comments(&original) {
            Progress::new(global.quiet).say(format!("{name} left as it was"));
            return Ok(());
        }
        if edited == text {
            let kept = file.keep();
            return Err(Outcome::Failed(anyhow!(
                "left as it was refused; the text is kept in {}",
                kept.display()
            )));
        }
        match submit(global, &mut objects, &object, name, &bare).await {
            Ok(became) => return Ok(tell(global.output, name, &became)?),
            Err(Outcome::Failed(error)) => text = headed(name, &error_lines(&error), &bare),
            Err(other) => {
                Progress::new(global.quiet).say(format!("the text is kept in {}", file.keep().display()));
                return Err(other);
            }
        }
    }
}

/// What is wrong with the text, or what the server says against it, is a failure; the rest ends the command. `base` is the
/// object that the text was made of.
async fn submit(
    global: &Global,
    objects: &mut Objects,
    base: &Object,
    name: &Name,
    text: &str,
) -> Result<String, Outcome> {
    let refuse = |error: String| Outcome::Failed(anyhow!(error));
    let entries =
        read_text("the text", text, Tenant::default()).map_err(|faults| refuse(faults.to_string()))?;
    let [entry] = entries.as_slice() else {
        return Err(refuse(format!("the text must declare {name}, and nothing else")));
    };
    if entry.name() != *name {
        return Err(refuse(format!("the text must declare {name}, and nothing else")));
    }
    let applied = within(global.timeout(), apply_onto(objects, base, name, entry.json.clone())).await?;
    let is_edited = applied.outcome.as_str() == "configured";
    Ok(if is_edited { "edited" } else { applied.outcome.as_str() }.to_owned())
}

/// Applies an edited object. A new version of its status alone, which the server may write at any time, is no conflict.
async fn apply_onto(
    objects: &mut Objects,
    base: &Object,
    name: &Name,
    mut edited: Value,
) -> Result<Applied, CallError> {
    let mut attempt = 1;
    loop {
        let error = match objects.apply(&edited, ApplyOptions::default()).await {
            Err(error) if attempt < ATTEMPTS && is_stale(&error) => error,
            done => return done,
        };
        let newest = objects.get(name).await?;
        let version = edited.pointer_mut("/metadata/resource_version");
        match version.filter(|version| **version == base.metadata.resource_version.as_str() || attempt > 1) {
            Some(version) if editable(&newest, false) == editable(base, false) => {
                *version = json!(newest.metadata.resource_version);
            }
            _ => return Err(error),
        }
        attempt += 1;
    }
}

fn error_lines(error: &anyhow::Error) -> Vec<String> {
    format!("{error:#}").lines().map(str::to_owned).collect()
}

/// The text under comments that say what it is, and what was wrong with it.
fn headed(name: &Name, errors: &[String], text: &str) -> String {
    let mut head =
        format!("# {name}: change it, save, and leave the editor. Leave it as it is to change nothing.\n");
    if !errors.is_empty() {
        head += "#\n# It was refused:\n";
        errors.iter().for_each(|line| head += &format!("# {line}\n"));
    }
    head + text
}

/// Without the lines that are comments from their beginning; no line of our YAML begins so.
fn without_comments(text: &str) -> String {
    text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect()
}

/// The editor may be a command with arguments, as shells take it.
async fn open_editor(path: &Path) -> Result<(), Outcome> {
    let chosen = ["VISUAL", "EDITOR"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|it| !it.is_empty()));
    let editor = chosen.unwrap_or_else(|| "vi".to_owned());
    let mut command = tokio::process::Command::new("sh");
    command.arg("-c").arg(format!("{editor} \"$1\"")).arg("sh").arg(path).kill_on_drop(true);
    let status = command.status().await.with_context(|| format!("could not start {editor}"))?;
    if status.success() { Ok(()) } else { Err(Outcome::Failed(anyhow!("{editor} ended with {status}"))) }
}

/// A file that only its user reads, gone with its command unless it is kept.
#[derive(Debug)]
struct Scratch {
    path: PathBuf,
    is_kept: std::cell::Cell<bool>,
}

impl Scratch {
    fn create(name: &Name) -> anyhow::Result<Self> {
        let stem = name.to_string().replace('/', "-");
        for attempt in 0u32.. {
            let path =
                std::env::temp_dir().join(format!("mvm-edit-{stem}-{}-{attempt}.yaml", std::process::id()));
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(_) => return Ok(Self { path, is_kept: std::cell::Cell::new(false) }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && attempt < 100 => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("could not create {}", path.display()));
                }
            }
        }
        unreachable!("attempts end")
    }

    fn write(&self, text: &str) -> anyhow::Result<()> {
        let write =
            || OpenOptions::new().write(true).truncate(true).open(&self.path)?.write_all(text.as_bytes());
        write().with_context(|| format!("could not write {}", self.path.display()))
    }

    /// Editors may put another file in its place.
    fn read(&self) -> anyhow::Result<String> {
        let mut text = String::new();
        let read = File::open(&self.path).and_then(|mut file| file.read_to_string(&mut text));
        read.with_context(|| format!("could not read {}", self.path.display()))?;
        Ok(text)
    }

    fn keep(&self) -> &Path {
        self.is_kept.set(true);
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.is_kept.get() {
            // It is in the folder for temporary files.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
