//! Images that can't be had, and folders that change under their pools.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_agent::node::assemble::NodeSettings;
use mvm_image::{ImageSettings, Images};
use mvm_proto::DesiredState;
use mvm_proto::status::{Event, NodeStatus};
use mvm_vmm::FakeDriver;
use serde_json::json;
use tokio::sync::broadcast::Receiver;

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::test_node::{TestNode, condition, reason, settings};

const PATIENCE: Duration = Duration::from_secs(60);

/// A folder with what passes for a kernel and an initrd.
fn folder(dir: &Path) -> PathBuf {
    let folder = dir.join("image-folder");
    std::fs::create_dir_all(&folder).unwrap();
    fill(&folder, "first");
    folder
}

/// The least that counts as a kernel is an ELF file with something to load and the note that says where to enter.
fn fill(folder: &Path, name: &str) {
    let note = [&[4_u8, 0, 0, 0][..], &[4, 0, 0, 0], &[18, 0, 0, 0], b"Xen\0", &[0; 4]].concat();
    let segments: [(u32, &[u8]); 2] = [(1, b"code"), (4, &note)];
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(64, 0);
    (file[18], file[32], file[54], file[56]) = (62, 64, 56, 2);
    let mut at = 64 + 56 * 2;
    for (kind, content) in segments {
        let mut entry = [0; 56];
        entry[..4].copy_from_slice(&kind.to_le_bytes());
        entry[8..16].copy_from_slice(&u64::try_from(at).unwrap().to_le_bytes());
        entry[32..40].copy_from_slice(&u64::try_from(content.len()).unwrap().to_le_bytes());
        entry[48] = 4;
        file.extend_from_slice(&entry);
        at += content.len();
    }
    segments.iter().for_each(|(_, content)| file.extend_from_slice(content));
    std::fs::write(folder.join("kernel"), file).unwrap();
    std::fs::write(folder.join("initrd"), format!("070701{name}")).unwrap();
}

/// A node that really imports images, and looks at folders all the time.
async fn node(dir: &Path) -> TestNode {
    let settings = NodeSettings { interval: Duration::from_millis(50), ..settings(dir) };
    let images = ImageSettings {
        first_retry: Duration::from_millis(20),
        longest_retry: Duration::from_millis(20),
        folder_quiet: Duration::ZERO,
        ..ImageSettings::default()
    };
    let images = Images::open(&settings.images_dir, images).unwrap();
    TestNode::start_from(dir, settings, FakeDriver::in_memory(), images).await
}

fn of_folder(folder: &Path, counts: [u32; 3]) -> DesiredState {
    let mut pool = pool("workers", counts[0], counts[1], counts[2]);
    pool["stopped_retention_seconds"] = json!(0);
    pool["flake_ref"] = json!(format!("path:{}", folder.display()));
    parse(&document(&[tenant("acme", 3, &[pool])]))
}

/// The next event of one of these kinds.
async fn next_of(events: &mut Receiver<Event>, kinds: &[&str]) -> Event {
    let next = async {
        loop {
            let event = events.recv().await.unwrap();
            if kinds.contains(&event.kind.as_str()) {
                return event;
            }
        }
    };
    tokio::time::timeout(PATIENCE, next).await.unwrap()
}

#[tokio::test]
async fn a_folder_that_changed_rolls_its_pool_to_the_new_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path());
    let node = node(dir.path()).await;
    node.want(of_folder(&folder, [1, 0, 1]));
    node.until_counts(1, 0, 1).await;
    let ids = [node.ids("running"), node.ids("sleeping")];
    let mut events = node.handle.events().subscribe();
    fill(&folder, "another");
    let mut replaced: Vec<_> = Vec::new();
    while replaced.len() < 2 {
        replaced.push(next_of(&mut events, &["InstanceReplaced"]).await.subject);
    }
    let mut expected: Vec<_> = ids.iter().flatten().map(|id| format!("acme/workers/{id}")).collect();
    expected.sort();
    replaced.sort();
    assert_eq!(replaced, expected);
    node.until_counts(1, 0, 1).await;
}

#[tokio::test]
async fn an_image_that_can_not_be_had_is_told_until_it_is_mended_and_once_as_an_event() {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder(dir.path());
    std::fs::rename(folder.join("kernel"), folder.join("hidden")).unwrap();
    let node = node(dir.path()).await;
    let mut events = node.handle.events().subscribe();
    node.want(of_folder(&folder, [1, 0, 0]));
    let told = next_of(&mut events, &["ImageUnavailable"]).await;
    assert_eq!(told.subject, "acme/workers");
    assert!(told.message.contains("InvalidImage") && told.message.contains("no file `kernel`"), "{told:?}");
    // Tried again many times, and told the same all the while.
    let mut passes = node.handle.passes();
    let first = passes.borrow().count;
    while passes.borrow().count < first + 10 {
        tokio::time::timeout(PATIENCE, passes.changed()).await.unwrap().unwrap();
        let status = node.handle.status().borrow().clone();
        assert_eq!(reason(&status, "ArtifactsReady"), "InvalidImage");
        assert!(message(&status, "ArtifactsReady").contains(&format!("path:{}", folder.display())));
    }
    std::fs::rename(folder.join("hidden"), folder.join("kernel")).unwrap();
    let next = next_of(&mut events, &["ImageUnavailable", "ImageReady"]).await;
    assert_eq!((next.kind.as_str(), next.subject.as_str()), ("ImageReady", "acme/workers"));
    let status = node.until_counts(1, 0, 0).await;
    assert_eq!(condition(&status, "ArtifactsReady"), "True");
}

fn message<'a>(status: &'a NodeStatus, kind: &str) -> &'a str {
    status.conditions.iter().find(|c| c.r#type == kind).map_or("", |c| c.message.as_str())
}
