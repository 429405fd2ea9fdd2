//! Finds out the version of this machine's QEMU, and whether its sandbox works. Done once.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

use super::args::SANDBOX;

/// The oldest whose machine `microvm` has ACPI, and whose options are the ones used here.
pub(super) const MIN_VERSION: (u32, u32) = (6, 2);

/// Printing a version takes milliseconds; a program that takes this long is no QEMU.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    pub program: PathBuf,
    /// As printed: `7.2.22 (Debian 1:7.2+dfsg-7)`. Saved memory is bound to it.
    pub version: String,
    pub sandbox: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    #[error("{program} was not found; install qemu-system-x86 or name the program by setting")]
    Missing { program: PathBuf },
    #[error("could not run {program}")]
    Run {
        program: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{program} did not print its version within {ANSWER_WITHIN:?}")]
    Silent { program: PathBuf },
    #[error("{program} does not say that it is QEMU, but {said:?}")]
    NotQemu { program: PathBuf, said: String },
    #[error("{program} is QEMU {version}; at least {}.{} is needed", MIN_VERSION.0, MIN_VERSION.1)]
    TooOld { program: PathBuf, version: String },
}

impl Binary {
    /// Whether it is a QEMU that can be used.
    pub async fn check(program: &Path) -> Result<(), BinaryError> {
        version_of(program).await.map(drop)
    }

    pub async fn examine(program: &Path) -> Result<Self, BinaryError> {
        let version = version_of(program).await?;
        let sandbox = sandbox_works(program).await;
        if !sandbox {
            tracing::warn!(program = %program.display(), "QEMU's sandbox does not work here; VMMs run without it");
        }
        Ok(Self { program: program.to_owned(), version, sandbox })
    }
}

async fn version_of(program: &Path) -> Result<String, BinaryError> {
    let run = quiet(program, &["-version"]).stdout(Stdio::piped()).stdin(Stdio::null()).output();
    let output = match timeout(ANSWER_WITHIN, run).await {
        Err(_) => return Err(BinaryError::Silent { program: program.to_owned() }),
        Ok(Err(cause)) if cause.kind() == io::ErrorKind::NotFound => {
            return Err(BinaryError::Missing { program: program.to_owned() });
        }
        Ok(Err(cause)) => return Err(BinaryError::Run { program: program.to_owned(), cause }),
        Ok(Ok(output)) => output,
    };
    let said = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned();
    let Some((version, numbers)) = parse_version(&said) else {
        return Err(BinaryError::NotQemu { program: program.to_owned(), said });
    };
    if numbers < MIN_VERSION {
        return Err(BinaryError::TooOld { program: program.to_owned(), version });
    }
    Ok(version)
}

fn quiet(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).stderr(Stdio::null()).kill_on_drop(true);
    command
}

/// The version in the first line that QEMU prints, as text and as numbers.
fn parse_version(line: &str) -> Option<(String, (u32, u32))> {
    let version = line.strip_prefix("QEMU emulator version ")?;
    let mut numbers = version.split(['.', ' ']).map(str::parse);
    let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some((version.to_owned(), (major, minor)))
}

/// Starts an empty machine in the sandbox and ends it: a QEMU that was built without it refuses at once.
async fn sandbox_works(program: &Path) -> bool {
    let args = ["-sandbox", SANDBOX, "-M", "none", "-nodefaults", "-no-user-config", "-display", "none"];
    let mut command = quiet(program, &args);
    command.args(["-qmp", "stdio"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let run = async {
        let mut child = command.spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\"}\n").await?;
            // Kept open until it has ended: the end of its input would end it too.
            let status = child.wait().await;
            drop(input);
            return status;
        }
        child.wait().await
    };
    matches!(timeout(ANSWER_WITHIN, run).await, Ok(Ok(status)) if status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_distributions_print() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)";
        let (text, numbers) = parse_version(debian).unwrap();
        assert_eq!((text.as_str(), numbers), ("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)", (7, 2)));
        assert_eq!(parse_version("QEMU emulator version 10.0.2").unwrap().1, (10, 0));
        assert_eq!(parse_version("bash: no such thing"), None);
    }
}
