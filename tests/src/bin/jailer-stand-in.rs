//! `jailer-stand-in`: takes the jailer's command line and becomes what it was told to jail.

fn main() -> std::process::ExitCode {
    mvm_tests::stand_in::jailer::run()
}
