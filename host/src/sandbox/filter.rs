//! Filters on system calls, as programs for the kernel.
//!
//! A filter of seccompiler has two answers; the strictest answer of several filters counts. So there is one for each
//! answer that differs from the rest: `ENOSYS` for what the C library and QEMU try first and do without, `EPERM` for
//! what no VMM needs, success without effect for holes that are [`Holes::Pretended`], and for [`Filter::Strict`] the end
//! of the process for whatever is not on its list.
//!
//! On x86-64 a call also has a second number, of the x32 interface, that no list names: those are all refused.

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::filter_lists::{ABSENT, COMMANDS, FORBIDDEN, HOST_COMMANDS, PROBED, USED};
use super::{Filter, Holes};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The programs, in the order in which they are installed. `launch` is the descriptor from which the VMM is executed:
/// the only one, and one that it can't have again.
pub(super) fn programs(
    filter: Filter,
    holes: Holes,
    launch: u32,
    kvm: bool,
) -> Result<Vec<BpfProgram>, BackendError> {
    let mut forbidden = unconditional(FORBIDDEN);
    forbidden.extend(conditional(launch)?);
    let mut programs = vec![
        compile(unconditional(ABSENT), SeccompAction::Errno(errno(libc::ENOSYS)), SeccompAction::Allow)?,
        compile(forbidden, SeccompAction::Errno(errno(libc::EPERM)), SeccompAction::Allow)?,
    ];
    if holes == Holes::Pretended {
        programs.push(compile(pretended_holes()?, SeccompAction::Errno(0), SeccompAction::Allow)?);
    }
    if cfg!(target_arch = "x86_64") {
        programs.push(no_second_numbers());
    }
    if filter == Filter::Strict {
        // What is refused above is allowed here, so that trying it is no death.
        let mut known = unconditional(USED);
        known.extend(unconditional(ABSENT));
        known.extend(unconditional(PROBED));
        let probed =
            compile(unconditional(PROBED), SeccompAction::Errno(errno(libc::EPERM)), SeccompAction::Allow)?;
        programs.push(probed);
        programs.push(commands(kvm));
        // The last: after it no call is left that is not on the list.
        programs.push(compile(known, SeccompAction::Allow, SeccompAction::KillProcess)?);
    }
    Ok(programs)
}

/// The C library's numbers are signed, the filter's are not.
fn errno(number: i32) -> u32 {
    number.unsigned_abs()
}

fn compile(rules: Rules, matched: SeccompAction, other: SeccompAction) -> Result<BpfProgram, BackendError> {
    let arch: TargetArch = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, other, matched, arch)?.try_into()
}

fn unconditional(calls: &[i64]) -> Rules {
    calls.iter().map(|call| (*call, Vec::new())).collect()
}

/// Calls that are forbidden with some arguments only. Several rules for one call are alternatives.
fn conditional(launch: u32) -> Result<Rules, BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let argument = |index, operator, value: u64| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)
            .and_then(|condition| SeccompRule::new(vec![condition]))
    };
    let thread = u64::from(libc::CLONE_THREAD.cast_unsigned());
    let unix = u64::from(libc::AF_UNIX.cast_unsigned());
    let mut rules = Rules::from([
        // Threads, and no processes. Namespaces can't be asked for together with a thread.
        (libc::SYS_clone, vec![argument(0, MaskedEq(thread), 0)?]),
        (libc::SYS_socket, vec![argument(0, Ne, unix)?]),
        (libc::SYS_socketpair, vec![argument(0, Ne, unix)?]),
        (
            libc::SYS_execveat,
            vec![
                argument(0, Ne, u64::from(launch))?,
                argument(4, Ne, u64::from(libc::AT_EMPTY_PATH.cast_unsigned()))?,
            ],
        ),
    ]);
    let host_commands = HOST_COMMANDS.iter().map(|command| argument(1, Eq, u64::from(*command)));
    rules.insert(libc::SYS_ioctl, host_commands.collect::<Result<_, _>>()?);
    // Pages of equal content, shared with other VMMs, tell by their timing what those have in memory.
    let mergeable = u64::from(libc::MADV_MERGEABLE.cast_unsigned());
    rules.insert(libc::SYS_madvise, vec![argument(2, Eq, mergeable)?]);
    Ok(rules)
}

/// Holes in files, which a VMM believes to have made and has not.
///
/// QEMU gives back a guest's memory by a hole in the file that it is mapped from, and then by letting its own pages go. The
/// file is the template that others map too: only the second may happen. A VMM with a disk that could be trimmed must
/// not be told that it is, for it would believe the blocks to be empty.
fn pretended_holes() -> Result<Rules, BackendError> {
    let hole = u64::from(libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned());
    let condition = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(hole), hole)?;
    Ok(Rules::from([(libc::SYS_fallocate, vec![SeccompRule::new(vec![condition])?])]))
}

/// Instructions of a filter that is written by hand, because seccompiler's have no third answer and no ranges.
mod instruction {
    use seccompiler::sock_filter;

    /// Offsets in what a filter sees: the call's number, and the lower half of its second argument.
    pub(super) const NUMBER: u32 = 0;
    pub(super) const SECOND_ARGUMENT: u32 = if cfg!(target_endian = "little") { 24 } else { 28 };

    pub(super) const fn load(offset: u32) -> sock_filter {
        sock_filter { code: 0x20, jt: 0, jf: 0, k: offset }
    }

    pub(super) const fn mask(bits: u32) -> sock_filter {
        sock_filter { code: 0x54, jt: 0, jf: 0, k: bits }
    }

    pub(super) const fn answer(action: u32) -> sock_filter {
        sock_filter { code: 0x06, jt: 0, jf: 0, k: action }
    }

    /// Skips so many instructions if it is this, and so many if it is not.
    pub(super) const fn equal(value: u32, then: u8, otherwise: u8) -> sock_filter {
        sock_filter { code: 0x15, jt: then, jf: otherwise, k: value }
    }

    pub(super) const fn at_least(value: u32, then: u8, otherwise: u8) -> sock_filter {
        sock_filter { code: 0x35, jt: then, jf: otherwise, k: value }
    }
}

/// `ENOSYS` for every call of the x32 interface.
fn no_second_numbers() -> BpfProgram {
    use instruction::{NUMBER, answer, at_least, load};
    const X32: u32 = 0x4000_0000;
    let refuse = libc::SECCOMP_RET_ERRNO | errno(libc::ENOSYS);
    vec![load(NUMBER), at_least(X32, 0, 1), answer(refuse), answer(libc::SECCOMP_RET_ALLOW)]
}

/// `EPERM` for every `ioctl` but the listed ones, and KVM's if there is KVM.
fn commands(kvm: bool) -> BpfProgram {
    use instruction::{NUMBER, SECOND_ARGUMENT, answer, equal, load, mask};
    const KIND: u32 = 0xff00;
    const KVM: u32 = 0xae00;
    let ioctl = u32::try_from(libc::SYS_ioctl).unwrap_or(u32::MAX);
    let (allow, refuse) = (libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_ERRNO | errno(libc::EPERM));
    let mut program = vec![load(NUMBER), equal(ioctl, 1, 0), answer(allow), load(SECOND_ARGUMENT)];
    for command in COMMANDS {
        program.extend([equal(*command, 0, 1), answer(allow)]);
    }
    if kvm {
        program.extend([mask(KIND), equal(KVM, 0, 1), answer(allow)]);
    }
    program.push(answer(refuse));
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_filters_compile_and_strict_is_baseline_and_more() {
        for holes in [Holes::Made, Holes::Pretended] {
            let baseline = programs(Filter::Baseline, holes, 1024, false).unwrap();
            let strict = programs(Filter::Strict, holes, 1024, false).unwrap();
            let bytes = |programs: &[BpfProgram]| programs.iter().map(Vec::len).collect::<Vec<_>>();
            assert_eq!(bytes(&strict)[..baseline.len()], bytes(&baseline));
            assert!(strict.len() > baseline.len());
        }
    }

    #[test]
    fn a_command_is_allowed_or_the_hosts_and_never_both() {
        assert!(!COMMANDS.iter().any(|command| HOST_COMMANDS.contains(command)));
        // KVM's are allowed with KVM only: three instructions more.
        assert_eq!(commands(true).len(), commands(false).len() + 3);
    }

    #[test]
    fn no_call_is_on_two_lists() {
        let mut all: Vec<_> = [ABSENT, PROBED, USED].concat();
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count);
        assert!(!FORBIDDEN.iter().any(|call| USED.contains(call) || ABSENT.contains(call)));
    }
}
