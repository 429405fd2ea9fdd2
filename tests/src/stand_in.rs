//! A process that keeps Firecracker's rules and boots nothing: for the driver's tests on machines without KVM.
//!
//! It takes Firecracker's command line, serves its API on a unix socket and refuses what the real 1.16.1 refuses, with
//! its statuses, its words where they matter, and its exit codes. Its guest is the real guest program as an ordinary
//! child process: a pause stops it, a snapshot packs its folder into the memory file, a vsock connection leads to its
//! socket. [`rules`] decides, [`machine`] acts, [`vsock`] and [`api`] are its two interfaces.

pub mod api;
pub mod arguments;
pub mod guest;
pub mod jailer;
pub mod machine;
pub mod rules;
pub mod snapshot;
pub mod vsock;
pub mod written;

use std::process::ExitCode;
use std::sync::{Arc, mpsc};

use arguments::{Arguments, Asked, Fault};
use machine::Machine;

/// What `firecracker-stand-in` does.
pub fn run() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match arguments::parse(&words) {
        Ok(Asked::Run(arguments)) => serve(arguments),
        Ok(Asked::Guest { parent }) => guest::be_the_guest(parent),
        Ok(Asked::Print(text)) => {
            say(&text);
            ExitCode::SUCCESS
        }
        Err(fault) => {
            say(&fault);
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: Arguments) -> ExitCode {
    match arguments.fault {
        Some(Fault::CrashAtStart) => {
            say("RunWithApi error: something is very wrong");
            return ExitCode::FAILURE;
        }
        Some(Fault::HangBeforeSocket) => loop {
            std::thread::park();
        },
        _ => {}
    }
    let socket = arguments.api_sock.clone();
    let (start_guest, guest_wanted) = mpsc::channel();
    let machine = match Machine::new(arguments, start_guest) {
        Ok(machine) => Arc::new(machine),
        Err(cause) => {
            say(&format!("Could not initialize logger: {cause}"));
            return ExitCode::FAILURE;
        }
    };
    if let Err(cause) = api::listen(&socket, &machine) {
        say(&format!(
            "Failed to open the API socket at: {socket}. Check that it is not already used. {cause}"
        ));
        return ExitCode::FAILURE;
    }
    // This thread starts the guest and outlives it: a child that asks to die with its parent means the thread that
    // started it.
    let Ok(folder) = guest_wanted.recv() else { return ExitCode::FAILURE };
    guest::run_until_its_end(&machine, &folder);
    // However a guest ends, this is the code.
    ExitCode::SUCCESS
}

/// Standard output is the guest's console and, until a logger is set, the log.
#[allow(clippy::print_stdout, reason = "this is a program; its output is what the driver reads")]
pub(crate) fn say(text: &str) {
    println!("{text}");
}
