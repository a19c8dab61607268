//! The results of a device's transfers, for the report of a run.

use cedos_lab_link::Time;
use cedos_lab_scenario::{Direction, FlowReport, ScenarioFlow};

use crate::account::Account;
use crate::device::SimDevice;
use crate::proxy::Proxy;
use crate::stream::receipt;
use crate::transfer::{Progress, SimTransfer};

impl SimDevice {
    /// The results of all transfers.
    pub(crate) fn reports(&self, proxy: &Proxy) -> Vec<FlowReport> {
        let flows = self.specs.iter().zip(&self.transfers).zip(&self.accounts);
        flows
            .map(|((spec, t), account)| self.report(spec, t, account, proxy))
            .collect()
    }

    fn report(
        &self,
        spec: &ScenarioFlow,
        t: &SimTransfer,
        account: &Account,
        proxy: &Proxy,
    ) -> FlowReport {
        let size = spec.bytes.unwrap_or(0);
        let finished = match t.progress {
            Progress::Done(at) => Some(at),
            _ => None,
        };
        let (bytes, shown) = match spec.direction {
            Direction::Down => (t.sink.content_bytes(), Some(t.sink.receipt())),
            Direction::Up => {
                let told = t.sink.whole_head().and_then(|d| d.try_into().ok());
                (t.id.map_or(0, |id| proxy.upload_bytes(id)), told)
            }
        };
        let sha256_ok = finished.is_some() && shown == Some(receipt(t.seed, size));
        let finished_s = finished.filter(|_| sha256_ok).map(Time::as_secs_f64);
        let carried = self.names.iter().zip(&account.by_link);
        FlowReport {
            id: spec.id.clone(),
            bytes,
            sha256_ok,
            finished_s,
            first_byte_s: account.came.map(|(first, _)| first.as_secs_f64()),
            last_byte_s: account.came.map(|(_, last)| last.as_secs_f64()),
            silence_max_s: account.came.map(|_| account.silence_max.as_secs_f64()),
            deadline_s: spec.deadline_s,
            deadline_met: finished_s.is_some_and(|at| spec.deadline_s.is_none_or(|by| at <= by)),
            bytes_by_link: carried
                .filter(|(_, n)| **n > 0)
                .map(|(name, n)| (name.clone(), *n))
                .collect(),
            duplicate_bytes: account.duplicate + t.id.map_or(0, |id| proxy.undone(id)),
        }
    }
}
