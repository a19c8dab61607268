//! Information about a socket's flow and its paths, for `D2TP_SO_INFO`.

use std::net::SocketAddr;

use d2tp_driver::{LinkUse, PathState, PathStats};
use d2tp_links::CostClass;

use crate::carried_flow::CarriedFlow;
use crate::header::PATHS_MAX;
use crate::info::{D2tpInfo, D2tpPathInfo, NAME_BYTES, NO_PATH, NO_REASON, OPEN, OVER, PATH_COST};
use crate::server_session::ServerSessionState;

/// The information of a socket whose flow is over now.
pub(crate) fn last_info(held: &CarriedFlow) -> D2tpInfo {
    D2tpInfo {
        di_state: OVER,
        di_reason: NO_REASON,
        di_bytes_ahead: 0,
        ..info_of(held)
    }
}

/// The information of a socket whose flow is carried.
pub(crate) fn info_of(held: &CarriedFlow) -> D2tpInfo {
    let ahead = held.read_ahead.bytes();
    // What lies in the pair may not be counted yet.
    let received = held.received.get() + held.read_ahead.kept();
    let mut info = D2tpInfo {
        di_state: OPEN,
        di_bytes_sent: held.sent.get(),
        di_bytes_acked: held.acknowledged(),
        di_bytes_received: received.max(ahead),
        di_bytes_ahead: ahead,
        ..D2tpInfo::idle()
    };
    if let Some(left) = held.options.borrow().time_left() {
        info.di_slack_ms = i64::try_from(left.as_millis()).unwrap_or(i64::MAX);
    }
    let paths = held.flow.borrow().connection().paths();
    info.di_paths_count = paths.len().min(PATHS_MAX) as u32;
    let statuses = held
        .session
        .as_ref()
        .map(|line| line.0.device.link_statuses());
    for (to, path) in info.di_paths.iter_mut().zip(&paths) {
        let link = path.addresses.link;
        let device = held.session.as_ref().map(|line| &line.0.device);
        let name = device.and_then(|device| device.link_name(link));
        let status = name.as_ref().and_then(|name| {
            statuses
                .iter()
                .flatten()
                .find(|status| status.name == *name)
        });
        set_path(to, path, name.as_deref());
        if let Some(status) = status {
            to.dpi_class = class(status.class);
            to.dpi_rate = status.rate.unwrap_or(0);
        }
    }
    let works = |path: &&PathStats| path.state == PathState::Active;
    let opening = held
        .session
        .as_ref()
        .is_some_and(|line| *line.0.state.borrow() == ServerSessionState::Opening);
    // A link that is gone keeps its counts, but cannot carry anything.
    let costly = statuses
        .iter()
        .flatten()
        .filter(|status| status.usage != LinkUse::Off);
    let mut costly = costly.filter(|status| status.class != CostClass::Free);
    info.di_reason = match paths.iter().find(works) {
        Some(_) => NO_REASON,
        None if opening && !paths.is_empty() => NO_REASON,
        None if costly.next().is_some() => PATH_COST,
        None => NO_PATH,
    };
    info
}

fn set_path(info: &mut D2tpPathInfo, path: &PathStats, name: Option<&str>) {
    let name = name.unwrap_or_default().as_bytes();
    let len = name.len().min(NAME_BYTES - 1);
    info.dpi_link[..len].copy_from_slice(&name[..len]);
    info.dpi_state = match path.state {
        PathState::Opening => 0,
        PathState::Active => 1,
        PathState::Silent => 2,
    };
    let micros = |span: std::time::Duration| span.as_micros().min(u128::from(u32::MAX)) as u32;
    info.dpi_rtt_us = micros(path.rtt.into());
    info.dpi_rtt_min_us = micros(path.rtt_min.into());
    info.dpi_bytes_received = path.payload_in;
    info.dpi_bytes_sent = path.payload_out;
}

fn class(class: CostClass) -> u32 {
    match class {
        CostClass::Free => 0,
        CostClass::Metered => 1,
        CostClass::Roaming => 2,
    }
}

/// The current address of a flow's peer.
pub(crate) fn far_end(held: &CarriedFlow) -> Option<SocketAddr> {
    let paths = held.flow.borrow().connection().paths();
    let active = paths.iter().find(|path| path.state == PathState::Active);
    active.or(paths.first()).map(|path| path.addresses.remote)
}
