//! That operations can be told to another process. What they do is in `tests/it/remote/suite.rs`.

use std::path::PathBuf;

use mvm_proto::InstanceId;

use super::*;

fn id() -> InstanceId {
    InstanceId::from_bits(0x7e57)
}

#[test]
fn operations_are_values_that_survive_the_wire() {
    let process = ProcessIdentity { pid: 7, start_time: 8, boot_id: "b".to_owned() };
    let (instance, name) = (id(), "data.img".to_owned());
    let jail = Jail { instance: id(), root: "/jails/root".into(), uid: 1, gid: 2 };
    let files = vec![JailFile { source: "/kernel".into(), name: "kernel".to_owned(), writable: false }];
    let spawn = SpawnVmm {
        instance: id(),
        program: PathBuf::from("/bin/sh"),
        args: vec!["-c".to_owned()],
        log: "vmm.log".to_owned(),
        tap: Some("tn7i3".to_owned()),
        group: None,
        confine: None,
    };
    let operations = [
        Operation::MakeRunDir { instance: instance.clone() },
        Operation::RemoveRunDir { instance: instance.clone() },
        Operation::RemoveFile { instance: instance.clone(), name: name.clone() },
        Operation::WriteFile { instance: instance.clone(), name: name.clone(), text: "{}".to_owned() },
        Operation::MakeDir { instance: instance.clone(), name: name.clone() },
        Operation::Rename { instance: instance.clone(), from: name.clone(), to: "b".to_owned() },
        Operation::TrimLog { instance: instance.clone(), name: name.clone(), max_bytes: 1 },
        Operation::MakeJail { jail: jail.clone(), files: files.clone() },
        Operation::ShareWithJail { jail: jail.clone(), files },
        Operation::UnshareFromJail { jail: jail.clone(), names: vec![name.clone()] },
        Operation::RemoveJail { jail },
        Operation::MakeDisk { instance, name, size_mib: 16 },
        Operation::SpawnVmm(spawn),
        Operation::EndProcess { process, signal: EndSignal::Terminate },
    ];
    for operation in operations {
        let text = serde_json::to_string(&operation).unwrap();
        assert_eq!(serde_json::from_str::<Operation>(&text).unwrap(), operation, "{text}");
    }
}
