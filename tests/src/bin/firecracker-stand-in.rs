//! `firecracker-stand-in`: keeps Firecracker's rules, boots nothing.

fn main() -> std::process::ExitCode {
    mvm_tests::stand_in::run()
}
