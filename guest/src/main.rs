//! `mvm-guest`: PID 1 of a microVM, or a service that the image's own init starts; or an ordinary process in tests.

use std::path::PathBuf;
use std::process::ExitCode;

use mvm_guest::{Guest, Settings, boot, channel, protocol};

const USAGE: &str = "usage: mvm-guest [--listen unix:PATH [--folder DIR]] [--max-version N]

Without --listen: serves the agent on this machine's virtio-serial port or vsock; as PID 1 it is its init, too.
--listen unix:PATH   be an ordinary process that changes nothing of this machine, and serve on a socket
--folder DIR         with --listen: where guest.json and run/ are (default: PATH.d)
--max-version N      speak no newer version of the protocol (in a microVM also by mvm.max_version=N, for the kernel)";

#[derive(Debug, Default)]
struct Arguments {
    listen: Option<PathBuf>,
    folder: Option<PathBuf>,
    max_version: Option<u32>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_init = std::process::id() == 1 && !arguments.iter().any(|argument| argument == boot::SERVICE);
    let outcome = if is_init {
        boot::run().map_err(|error| error.to_string())
    } else {
        read(&arguments).and_then(serve)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            boot::complain(&message);
            ExitCode::FAILURE
        }
    }
}

fn read(arguments: &[String]) -> Result<Arguments, String> {
    let mut read = Arguments::default();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        if word == boot::SERVICE {
            continue;
        }
        let value = words.next().ok_or(USAGE)?;
        match word.as_str() {
            "--listen" => read.listen = Some(value.strip_prefix("unix:").ok_or(USAGE)?.into()),
            "--folder" => read.folder = Some(value.into()),
            "--max-version" => read.max_version = Some(value.parse().map_err(|_| USAGE)?),
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(read)
}

fn serve(arguments: Arguments) -> Result<(), String> {
    let mut settings = match &arguments.listen {
        None => Settings::own(),
        Some(path) => {
            let beside = || PathBuf::from(format!("{}.d", path.display()));
            Settings::borrowed(&arguments.folder.unwrap_or_else(beside))
        }
    };
    let version =
        arguments.max_version.or_else(|| arguments.listen.is_none().then(boot::max_version).flatten());
    if let Some(version) = version {
        settings.max_version = version.clamp(protocol::MIN_VERSION, protocol::MAX_VERSION);
    }
    let guest = Guest::new(settings).map_err(|error| format!("could not begin: {error}"))?;
    let serving = guest.clone();
    let listen = arguments.listen.clone();
    std::thread::spawn(move || {
        let outcome = match &listen {
            Some(path) => channel::socket::serve_unix(path, &serving),
            None => channel::serve_forever(&serving),
        };
        // It only returns when there is no channel any more. Init, ours or the image's, may start this program again.
        boot::complain(&format!(
            "no channel: {}",
            outcome.err().map_or_else(String::new, |error| error.to_string())
        ));
        std::process::exit(1);
    });
    guest.wait_until_ended();
    if arguments.listen.is_none() {
        boot::power_off();
    }
    Ok(())
}
