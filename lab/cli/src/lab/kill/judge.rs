//! Checks an interrupted transfer: its bytes, the device's reports, the journals on the disks, and
//! the requests to the origin.

use std::path::Path;

use cedos_lab_scenario::content;
use serde_json::Value;

use super::remains::DeviceRemains;
use super::stage::KillCase;
use crate::lab::file_sha256;

/// Bytes that are received again when a download continues in another flow (docs/download.md).
const OVERLAP_BYTES: u64 = 16 * 1024;

/// Whether this line of a report announces the next flow.
fn asks_again(line: &serde_json::Value) -> bool {
    const REASONS: [&str; 3] = ["proxy_unreachable", "origin_wait", "path_too_slow"];
    line["event"] == "waiting" && REASONS.iter().any(|reason| line["reason"] == *reason)
}

/// The most bytes that an origin may have sent before a device gets an answer to its request: some
/// pieces of a body.
const UNHEARD_BYTES_MAX: u64 = 64 * 1024;

impl KillCase<'_> {
    /// The epochs that each start of the device used, as far as its log shows.
    pub(super) fn epochs(&self) -> Vec<Vec<u64>> {
        (0..self.devices)
            .map(|n| epochs_in(&self.folder().join(format!("qlog-{n}"))))
            .collect()
    }

    /// R2, R5: checks that the file is the object.
    pub(super) fn judge_bytes(&mut self) {
        let right = content::sha256(self.seed, self.bytes);
        match file_sha256(&self.device_disk().join("got")) {
            Some(sum) if sum == right => {}
            Some(_) => self.verdict.lost.push("the file has other bytes".into()),
            None => self.verdict.lost.push("there is no file".into()),
        }
    }

    /// Checks the reports, the journals and the origin's records.
    pub(super) fn judge(&mut self) {
        let disk = self.point.blows.iter().any(|blow| !blow.fault.kills());
        self.judge_resumption();
        self.judge_epochs();
        if !disk {
            self.judge_origin();
        }
    }

    /// R1: checks that durable bytes count and are not received again.
    fn judge_resumption(&mut self) {
        let reports = self.reports();
        let event = |report: &[Value], name: &str| {
            report.iter().find(|line| line["event"] == name).cloned()
        };
        if let (Some(remains), Some(second)) = (&self.device_remains, reports.get(1)) {
            let held = event(second, "begun").and_then(|b| b["held_bytes"].as_u64());
            if !remains.is_whole && held.is_some_and(|held| held < remains.durable) {
                let text = format!(
                    "{} bytes were safe, it began with {held:?}",
                    remains.durable
                );
                self.verdict.lost.push(text);
            }
        }
        for report in &reports {
            let (Some(begun), Some(done)) = (event(report, "begun"), event(report, "done")) else {
                continue;
            };
            let held = begun["held_bytes"].as_u64().unwrap_or(0);
            let came: u64 = done["bytes_by_link"]
                .as_object()
                .into_iter()
                .flatten()
                .filter_map(|(_, bytes)| bytes.as_u64())
                .sum();
            // Each new flow repeats a few bytes for comparison.
            let again = report.iter().filter(|line| asks_again(line)).count();
            let most = self.bytes.saturating_sub(held) + OVERLAP_BYTES * (again as u64 + 1);
            let is_got = done["file"].as_str().is_some_and(|f| f.ends_with("got"));
            if came > most && is_got {
                let text = format!("{came} bytes came, of {} with {held} held", self.bytes);
                self.verdict.repeated.push(text);
            }
        }
    }

    /// R3: checks that no epoch was used twice, and none that an earlier process may have used.
    fn judge_epochs(&mut self) {
        let used = self.epochs();
        let now = DeviceRemains::of(&self.device_disk(), &self.scratch());
        let before = self.device_remains.as_ref().map(|remains| &remains.epochs);
        // Epochs of different instances may be equal; an epoch without a reservation was not used.
        let same = before.is_some_and(|before| {
            let was_used = before.values().all(|free| *free > 0);
            was_used && !before.is_empty() && before.keys().eq(now.epochs.keys())
        });
        let runs: Vec<Vec<u64>> = match same {
            true => vec![used.concat()],
            false => used.clone(),
        };
        for mut epochs in runs {
            epochs.sort_unstable();
            let many = epochs.len();
            epochs.dedup();
            if epochs.len() < many {
                let text = format!("an epoch was used twice: {used:?}");
                self.verdict.wrong.push(text);
            }
        }
        if !same {
            return;
        }
        let Some(remains) = &self.device_remains else {
            return;
        };
        for (instance, free) in &remains.epochs {
            let later = used.iter().skip(1).flatten();
            let early = later.clone().find(|epoch| **epoch < u64::from(*free));
            if let (Some(epoch), true) = (early, now.epochs.contains_key(instance)) {
                let text =
                    format!("epoch {epoch} was reserved by the process before ({free} is free)");
                self.verdict.wrong.push(text);
            }
        }
    }

    /// Checks that the origin is not asked for data that the proxy has, and is asked for everything
    /// again only if the documents permit it, in which case the device gives the reason.
    fn judge_origin(&mut self) {
        let asked = self.asked();
        let whole = asked.iter().filter(|asked| asked.from.is_none()).count();
        let device = self.device_remains.clone();
        let proxy = self.proxy_remains.clone();
        // No byte was durable on the device, so it starts again.
        let from_zero = device.as_ref().is_some_and(|device| device.durable == 0);
        // The flow was younger than the journal's delay; for a device that started again, the
        // second flow.
        let flows = 1 + usize::from(from_zero);
        let unknown = proxy
            .as_ref()
            .is_some_and(|proxy| proxy.copies.len() < flows);
        let allowed = 1 + usize::from(from_zero) + usize::from(unknown);
        if whole > allowed {
            self.verdict
                .repeated
                .push(format!("the origin was asked for all of it: {asked:?}"));
        }
        for from in asked.iter().filter_map(|asked| asked.from) {
            let had = proxy
                .as_ref()
                .is_some_and(|proxy| proxy.files.contains(&from));
            if !had {
                let copies = proxy.as_ref().map(|proxy| proxy.files.clone());
                let text = format!("asked from {from}, the proxy had {copies:?}: {asked:?}");
                self.verdict.repeated.push(text);
            }
        }
        if whole > 1 && device.is_none() {
            let reports = self.reports();
            let told = reports
                .iter()
                .flatten()
                .any(|line| line["reason"] == "proxy_unreachable" || line["event"] == "note");
            // A request without an answer is sent again in its flow: nothing was begun yet.
            let unheard = asked[0].sent <= UNHEARD_BYTES_MAX;
            if !told && !unheard {
                self.verdict
                    .wrong
                    .push("a flow was begun anew without a word".into());
            }
        }
    }
}

/// The epochs of all SYNs in a folder's logs.
fn epochs_in(folder: &Path) -> Vec<u64> {
    let mut epochs = Vec::new();
    for file in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let bytes = std::fs::read(file.path()).unwrap_or_default();
        for record in bytes.split(|byte| *byte == 0x1e) {
            let event: Value = serde_json::from_slice(record).unwrap_or_default();
            if event["name"] == "d2tp:handshake_sent" {
                epochs.extend(event["data"]["epoch"].as_u64());
            }
        }
    }
    epochs
}
