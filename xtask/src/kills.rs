//! Kill points: `cedos lab kill`, a few of them in the tests, thousands in the nightly run.

use std::process::Command;

use crate::step::cargo;

/// Kill points of a nightly run: an hour and a half of two cores.
pub const NIGHT_POINTS: u64 = 5_000;
/// The divisor of the share of points at which a call fails for want of a disk, and of those at
/// which the disk loses power.
const DISK_SHARE: u64 = 10;

/// The long run: SIGKILL, then failing disks, then disks without power, which needs root.
pub fn night(points: u64, seed: u64) -> [(String, Command); 3] {
    let some = points / DISK_SHARE;
    [("kill", points), ("disk", some), ("power", some)].map(|(fault, points)| {
        let mut command = cargo([
            "run",
            "--release",
            "--locked",
            "--quiet",
            "-p",
            "cedos-lab",
            "--",
        ]);
        command.args(["lab", "kill", "--fault", fault]);
        command.args(["--points", &points.to_string(), "--seed", &seed.to_string()]);
        (format!("{points} points, {fault}, seed {seed}"), command)
    })
}
