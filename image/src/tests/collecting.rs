//! What is removed, and what never is.

use std::time::Duration;

use super::*;

const NOTHING_STAYS: KeepRules =
    KeepRules { references_for: Duration::ZERO, young_for: Duration::ZERO, dry_run: false };

fn kept(collected: &Collected) -> Vec<Kept> {
    collected.kept.iter().map(|(_, why)| *why).collect()
}

#[test]
fn images_stay_for_instances_names_pins_and_their_youth_and_go_with_the_last_of_these() {
    let bench = Bench::new();
    let built = bench.import(&bench.good_input("a")).unwrap();
    let none = BTreeSet::new();
    let collect = |used: &BTreeSet<Digest>, rules: KeepRules| collect(&bench.store, used, &rules).unwrap();
    let day = Duration::from_secs(86_400);

    assert_eq!(kept(&collect(&BTreeSet::from([built.digest]), NOTHING_STAYS)), [Kept::InUse]);
    bench.store.pin(&built.reference, &built.profile, true).unwrap();
    assert_eq!(kept(&collect(&none, NOTHING_STAYS)), [Kept::Pinned]);
    bench.store.pin(&built.reference, &built.profile, false).unwrap();
    assert_eq!(kept(&collect(&none, KeepRules { references_for: day, ..NOTHING_STAYS })), [Kept::Referenced]);
    assert_eq!(kept(&collect(&none, KeepRules { young_for: day, ..NOTHING_STAYS })), [Kept::Young]);

    let would = collect(&none, KeepRules { dry_run: true, ..NOTHING_STAYS });
    assert_eq!(would.removed.len(), 1);
    assert!(bench.store.contains(&built.digest));
    assert_eq!(collect(&none, NOTHING_STAYS), would);
    assert_eq!(bench.store.list().unwrap(), []);
    assert_eq!(bench.store.references().unwrap(), []);
    assert_eq!(bench.leftovers(), [""; 0]);
}

#[test]
fn what_an_agent_wrote_down_as_in_use_stays_until_its_data_folder_is_gone() {
    let bench = Bench::new();
    let built = bench.import(&bench.good_input("a")).unwrap();
    let owner = bench.folder.path().join("agent");
    fs::create_dir(&owner).unwrap();
    let settings = ImageSettings { owner: Some(owner.clone()), ..ImageSettings::default() };
    let images = Images::open(bench.store.root(), settings).unwrap();
    images.set_in_use(&BTreeSet::from([built.digest])).unwrap();
    drop(images);

    let none = BTreeSet::new();
    assert_eq!(kept(&collect(&bench.store, &none, &NOTHING_STAYS).unwrap()), [Kept::InUse]);
    assert_eq!(remove(&bench.store, &built.digest, false).unwrap_err().reason(), "InUse");
    fs::remove_dir(&owner).unwrap();
    assert_eq!(collect(&bench.store, &none, &NOTHING_STAYS).unwrap().removed.len(), 1);
}

#[test]
fn nothing_is_removed_when_it_is_not_known_what_is_in_use() {
    let bench = Bench::new();
    bench.import(&bench.good_input("a")).unwrap();
    fs::write(bench.store.root().join("in-use/damaged.json"), "{").unwrap();
    let error = collect(&bench.store, &BTreeSet::new(), &NOTHING_STAYS).unwrap_err();
    assert!(error.to_string().contains("damaged.json"), "{error}");
    assert_eq!(bench.store.list().unwrap().len(), 1);
}

#[test]
fn an_image_that_was_just_resolved_is_not_collected_under_whoever_is_about_to_boot_it() {
    let bench = Bench::new();
    let input = bench.good_input("a");
    let digest = bench.import(&input).unwrap().digest;
    let images = Images::open(bench.store.root(), ImageSettings::default()).unwrap();
    assert_eq!(images.resolve(&of_folder(&input)), Resolution::Ready(digest));
    assert_eq!(kept(&images.collect(&BTreeSet::new(), &NOTHING_STAYS).unwrap()), [Kept::InUse]);
    // The command line sees the same.
    assert_eq!(kept(&collect(&bench.store, &BTreeSet::new(), &NOTHING_STAYS).unwrap()), [Kept::InUse]);
    assert!(images.boot_image(&digest, "").is_ok());
}
