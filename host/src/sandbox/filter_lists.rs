//! Which system calls are meant, for `filter.rs`.
//!
//! [`USED`] was found by tracing QEMU 7.2 (microvm, TCG) through boot, pause, saving into a descriptor, going on, ending,
//! loading from a descriptor and ending by a signal, with disks and sockets; and completed by hand with what the same
//! functions call in other builds of the C library, with what a TAP, a disk and KVM take, and with what ends a process.

use nix::libc::*;

/// Tried first by the C library and by QEMU, which then do without. `clone3` hides its flags from filters.
pub(super) const ABSENT: &[i64] =
    &[SYS_clone3, SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_userfaultfd];

/// What no VMM needs, and what is of use to one that was taken over.
pub(super) const FORBIDDEN: &[i64] = &[
    // Another program, or another process.
    SYS_execve,
    #[cfg(target_arch = "x86_64")]
    SYS_fork,
    #[cfg(target_arch = "x86_64")]
    SYS_vfork,
    // Other processes.
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_process_madvise,
    SYS_process_mrelease,
    SYS_pidfd_open,
    SYS_pidfd_getfd,
    SYS_pidfd_send_signal,
    SYS_kcmp,
    SYS_kill,
    SYS_tkill,
    SYS_rt_sigqueueinfo,
    SYS_rt_tgsigqueueinfo,
    SYS_move_pages,
    SYS_migrate_pages,
    // Another user or more rights.
    SYS_setuid,
    SYS_setgid,
    SYS_setreuid,
    SYS_setregid,
    SYS_setresuid,
    SYS_setresgid,
    SYS_setfsuid,
    SYS_setfsgid,
    SYS_setgroups,
    SYS_capset,
    SYS_personality,
    // Another view of the machine.
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_unshare,
    SYS_setns,
    SYS_open_tree,
    SYS_move_mount,
    SYS_fsopen,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fspick,
    SYS_mount_setattr,
    SYS_sethostname,
    SYS_setdomainname,
    // The agent finds a VMM by its working directory.
    SYS_chdir,
    SYS_fchdir,
    // Names that lead elsewhere: others follow paths in the run directory.
    #[cfg(target_arch = "x86_64")]
    SYS_symlink,
    SYS_symlinkat,
    #[cfg(target_arch = "x86_64")]
    SYS_link,
    SYS_linkat,
    #[cfg(target_arch = "x86_64")]
    SYS_mknod,
    SYS_mknodat,
    SYS_open_by_handle_at,
    SYS_name_to_handle_at,
    // Who may do what with its files.
    #[cfg(target_arch = "x86_64")]
    SYS_chown,
    #[cfg(target_arch = "x86_64")]
    SYS_lchown,
    SYS_fchown,
    SYS_fchownat,
    SYS_setxattr,
    SYS_lsetxattr,
    SYS_fsetxattr,
    // Keys of others.
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    // The kernel itself.
    SYS_bpf,
    SYS_perf_event_open,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    #[cfg(target_arch = "x86_64")]
    SYS_kexec_file_load,
    SYS_reboot,
    SYS_swapon,
    SYS_swapoff,
    SYS_syslog,
    SYS_acct,
    SYS_quotactl,
    SYS_quotactl_fd,
    SYS_nfsservctl,
    SYS_lookup_dcookie,
    SYS_fanotify_init,
    SYS_fanotify_mark,
    SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    SYS_modify_ldt,
    #[cfg(target_arch = "x86_64")]
    SYS_uselib,
    #[cfg(target_arch = "x86_64")]
    SYS_ustat,
    #[cfg(target_arch = "x86_64")]
    SYS_sysfs,
    #[cfg(target_arch = "x86_64")]
    SYS__sysctl,
    // The clock of everyone.
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_adjtimex,
    SYS_clock_adjtime,
    // Objects that outlive a process.
    SYS_shmget,
    SYS_shmat,
    SYS_shmctl,
    SYS_msgget,
    SYS_msgsnd,
    SYS_msgrcv,
    SYS_msgctl,
    SYS_semget,
    SYS_semop,
    SYS_semtimedop,
    SYS_semctl,
    SYS_mq_open,
    SYS_mq_unlink,
];

/// In the strict filter: refused, but no reason to end a QEMU that tries.
pub(super) const PROBED: &[i64] = &[
    SYS_execve,
    SYS_chdir,
    SYS_fchdir,
    SYS_kill,
    SYS_setpriority,
    SYS_sched_setaffinity,
    SYS_sched_setscheduler,
    SYS_mlock,
    SYS_mlock2,
    SYS_mlockall,
    SYS_mbind,
    #[cfg(target_arch = "x86_64")]
    SYS_rename,
    SYS_renameat,
    SYS_renameat2,
    #[cfg(target_arch = "x86_64")]
    SYS_mkdir,
    SYS_mkdirat,
    #[cfg(target_arch = "x86_64")]
    SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    SYS_chmod,
    SYS_fchmod,
    SYS_fchmodat,
    SYS_utimensat,
];

/// What is left to a VMM under the strict filter.
pub(super) const USED: &[i64] = &[
    // The launch: from one descriptor, once.
    SYS_execveat,
    // Memory. TCG writes code, so pages that are both written and executed can't be forbidden.
    SYS_brk,
    SYS_mmap,
    SYS_munmap,
    SYS_mremap,
    SYS_mprotect,
    SYS_madvise,
    SYS_mincore,
    SYS_msync,
    SYS_membarrier,
    SYS_memfd_create,
    SYS_get_mempolicy,
    SYS_set_mempolicy,
    SYS_pkey_alloc,
    SYS_pkey_mprotect,
    // Threads.
    SYS_clone,
    SYS_exit,
    SYS_exit_group,
    SYS_futex,
    SYS_set_robust_list,
    SYS_get_robust_list,
    SYS_set_tid_address,
    SYS_rseq,
    SYS_gettid,
    SYS_getpid,
    SYS_getppid,
    SYS_tgkill,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_getcpu,
    #[cfg(target_arch = "x86_64")]
    SYS_arch_prctl,
    SYS_prctl,
    SYS_seccomp,
    SYS_getpriority,
    // Signals.
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigpending,
    SYS_rt_sigsuspend,
    SYS_rt_sigtimedwait,
    SYS_sigaltstack,
    SYS_signalfd4,
    SYS_restart_syscall,
    // Time.
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_clock_nanosleep,
    SYS_gettimeofday,
    SYS_nanosleep,
    #[cfg(target_arch = "x86_64")]
    SYS_time,
    SYS_timer_create,
    SYS_timer_settime,
    SYS_timer_gettime,
    SYS_timer_getoverrun,
    SYS_timer_delete,
    SYS_timerfd_create,
    SYS_timerfd_settime,
    SYS_timerfd_gettime,
    // Files.
    #[cfg(target_arch = "x86_64")]
    SYS_open,
    SYS_openat,
    SYS_close,
    SYS_close_range,
    SYS_read,
    SYS_readv,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_write,
    SYS_writev,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_lseek,
    #[cfg(target_arch = "x86_64")]
    SYS_stat,
    #[cfg(target_arch = "x86_64")]
    SYS_lstat,
    SYS_fstat,
    SYS_newfstatat,
    SYS_statx,
    SYS_statfs,
    SYS_fstatfs,
    #[cfg(target_arch = "x86_64")]
    SYS_access,
    SYS_faccessat,
    SYS_faccessat2,
    #[cfg(target_arch = "x86_64")]
    SYS_readlink,
    SYS_readlinkat,
    #[cfg(target_arch = "x86_64")]
    SYS_getdents,
    SYS_getdents64,
    SYS_getcwd,
    #[cfg(target_arch = "x86_64")]
    SYS_unlink,
    SYS_unlinkat,
    SYS_umask,
    SYS_fcntl,
    SYS_flock,
    SYS_dup,
    #[cfg(target_arch = "x86_64")]
    SYS_dup2,
    SYS_dup3,
    SYS_fsync,
    SYS_fdatasync,
    SYS_sync_file_range,
    SYS_fallocate,
    SYS_ftruncate,
    SYS_fadvise64,
    SYS_copy_file_range,
    SYS_ioctl,
    SYS_io_setup,
    SYS_io_submit,
    SYS_io_getevents,
    SYS_io_destroy,
    // Waiting.
    #[cfg(target_arch = "x86_64")]
    SYS_poll,
    SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    SYS_select,
    SYS_pselect6,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    #[cfg(target_arch = "x86_64")]
    SYS_pipe,
    SYS_pipe2,
    // Sockets of the unix kind.
    SYS_socket,
    SYS_socketpair,
    SYS_bind,
    SYS_listen,
    SYS_accept,
    SYS_accept4,
    SYS_connect,
    SYS_shutdown,
    SYS_getsockname,
    SYS_getpeername,
    SYS_getsockopt,
    SYS_setsockopt,
    SYS_sendto,
    SYS_sendmsg,
    SYS_sendmmsg,
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_recvmmsg,
    // About itself and the machine.
    SYS_getrandom,
    SYS_uname,
    SYS_sysinfo,
    SYS_prlimit64,
    SYS_getrlimit,
    SYS_getrusage,
    SYS_times,
    SYS_getuid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getegid,
    SYS_getresuid,
    SYS_getresgid,
    SYS_getgroups,
    SYS_getpgrp,
    SYS_getpgid,
    SYS_getsid,
];

/// `ioctl` commands that are the host's business: the first puts bytes into a terminal's input as if typed, the others
/// make a TAP outlive its VMM, or another one of it.
pub(super) const HOST_COMMANDS: &[u32] = &[
    0x5412,     // TIOCSTI
    0x400454ca, // TUNSETIFF
    0x400454cb, // TUNSETPERSIST
    0x400454cc, // TUNSETOWNER
    0x400454cd, // TUNSETLINK
    0x400454ce, // TUNSETGROUP
    0x401054d5, // TUNATTACHFILTER
    0x800454e0, // TUNSETSTEERINGEBPF
    0x800454e1, // TUNSETFILTEREBPF
    0x400454e2, // TUNSETCARRIER
    0x8924,     // SIOCSIFHWADDR
];

/// `ioctl` commands that are left under the strict filter: of open files, of a TAP that is given, of a block device.
pub(super) const COMMANDS: &[u32] = &[
    0x5401,     // TCGETS, which is how a program asks whether it prints to a terminal
    0x5421,     // FIONBIO
    0x541b,     // FIONREAD
    0x5450,     // FIONCLEX
    0x5451,     // FIOCLEX
    0x800454cf, // TUNGETFEATURES
    0x800454d2, // TUNGETIFF
    0x400454d0, // TUNSETOFFLOAD
    0x400454d4, // TUNSETSNDBUF
    0x800454d3, // TUNGETSNDBUF
    0x800454d7, // TUNGETVNETHDRSZ
    0x400454d8, // TUNSETVNETHDRSZ
    0x400454d9, // TUNSETQUEUE
    0x400454dc, // TUNSETVNETLE
    0x400454de, // TUNSETVNETBE
    0x125e,     // BLKROGET
    0x1268,     // BLKSSZGET
    0x127b,     // BLKPBSZGET
    0x80081272, // BLKGETSIZE64
];
