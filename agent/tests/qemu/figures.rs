//! How long each step takes, and how much of it is ours. Not a test: run it by name, with `--ignored --nocapture`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use mvm_agent::driver::Driver as _;

use super::{driver, spec, subject};

const ROUNDS: usize = 50;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// The same two commands without a driver.
fn raw(run_dir: &Path) -> (Duration, Duration) {
    let stream = UnixStream::connect(run_dir.join("qmp.sock")).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let mut command = |command: &str| {
        let began = Instant::now();
        stream.write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes()).unwrap();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            if line.contains("\"return\"") {
                return began.elapsed();
            }
        }
    };
    command("qmp_capabilities");
    let times: Vec<_> = (0..ROUNDS).map(|_| (command("stop"), command("cont"))).collect();
    (median(times.iter().map(|time| time.0).collect()), median(times.iter().map(|time| time.1).collect()))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints figures, holds nothing"]
#[allow(clippy::print_stdout, reason = "the figures are the point")]
async fn figures() {
    let Some(subject) = subject("figures") else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let spec = spec(&subject, 90);
    let instance = &spec.instance;
    let driver_one = driver(dir.path());
    let began = Instant::now();
    driver_one.boot(&spec).await.unwrap();
    println!(
        "first boot(), with the version, the sandbox and the counter's rate asked: {:?}",
        began.elapsed()
    );
    driver_one.kill(instance).await.unwrap();
    let began = Instant::now();
    driver_one.boot(&spec).await.unwrap();
    println!("boot(): {:?}", began.elapsed());
    tokio::time::sleep(Duration::from_secs(6)).await;
    let (mut pauses, mut resumes) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let began = Instant::now();
        driver_one.pause(instance).await.unwrap();
        pauses.push(began.elapsed());
        let began = Instant::now();
        driver_one.resume(instance).await.unwrap();
        resumes.push(began.elapsed());
    }
    println!("pause {:?}, resume {:?}", median(pauses), median(resumes));
    let began = Instant::now();
    driver_one.pause(instance).await.unwrap();
    let snapshot = driver_one.snapshot(instance).await.unwrap();
    println!("pause + snapshot: {:?}", began.elapsed());
    let began = Instant::now();
    driver_one.kill(instance).await.unwrap();
    println!("kill: {:?}", began.elapsed());
    let began = Instant::now();
    driver_one.restore(&spec, &snapshot).await.unwrap();
    println!("restore: {:?}", began.elapsed());
    driver_one.resume(instance).await.unwrap();
    drop(driver_one);
    let run_dir = dir.path().join("vms").join(instance.as_str());
    let (stop, cont) = tokio::task::spawn_blocking(move || raw(&run_dir)).await.unwrap();
    println!("raw QMP: stop {stop:?}, cont {cont:?}");
    driver(dir.path()).remove(instance).await.unwrap();
}
