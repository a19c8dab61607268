//! The page of networks: what each costs and carries, and what was spent on those that cost.

use std::future::ready;
use std::sync::Arc;

use askama::Template;
use axum::Router;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cedos_text::escape_controls;
use serde_json::Value;

use super::frame::{self, PageContext, PageFact, PageFrame};
use super::live;
use super::transfer_card::name_of;
use crate::fetch::report::human_bytes;

/// The routes of this page.
pub(super) fn routes() -> Router<PageContext> {
    Router::new()
        .route("/networks", get(page))
        .route("/networks/updates", get(updates))
}

#[derive(Template)]
#[template(path = "networks.html")]
struct NetworksPage {
    frame: PageFrame,
    live: NetworksLive,
}

#[derive(Template)]
#[template(path = "networks_live.html")]
struct NetworksLive {
    base: Arc<str>,
    spending: SpendingView,
    networks: Vec<NetworkCard>,
}

/// What was spent of the budget.
pub(super) struct SpendingView {
    pub(super) text: String,
    percent: Option<u8>,
    rule: &'static str,
}

/// A network, ready to be shown.
struct NetworkCard {
    device: String,
    name: String,
    class: String,
    state_text: &'static str,
    facts: Vec<PageFact>,
    carries: Vec<CarriedTransfer>,
}

/// A transfer that a network carries.
struct CarriedTransfer {
    id: u64,
    name: String,
}

async fn page(State(context): State<PageContext>) -> Response {
    frame::html(&NetworksPage {
        frame: PageFrame {
            base: context.base.clone(),
            section: "networks",
        },
        live: NetworksLive::of(&context),
    })
}

async fn updates(State(context): State<PageContext>) -> Response {
    let view = context.clone();
    live::updates(&context, move || ready(Some(NetworksLive::of(&view)))).into_response()
}

impl NetworksLive {
    fn of(context: &PageContext) -> NetworksLive {
        let transfers = context.agent.list();
        let links = context.agent.net();
        let mut networks: Vec<&Value> = (links.iter())
            .filter(|link| link["kind"] != "loopback")
            .collect();
        networks.sort_by_key(|link| link["usable"] != true);
        NetworksLive {
            base: context.base.clone(),
            spending: SpendingView::of(&context.agent.budget()),
            networks: (networks.into_iter())
                .map(|link| NetworkCard::of(link, &transfers))
                .collect(),
        }
    }
}

fn share(used: u64, cap: u64) -> u8 {
    let percent = used.saturating_mul(100).checked_div(cap).unwrap_or(100);
    percent.min(100) as u8
}

impl SpendingView {
    /// What `cedos budget` says.
    pub(super) fn of(budget: &Value) -> SpendingView {
        let used = budget["used"].as_u64().unwrap_or(0);
        let since = budget["since"].as_str().unwrap_or("?");
        let spent = human_bytes(used);
        let cap = budget["cap"].as_u64();
        let text = match (cap, budget["left"].as_u64()) {
            (Some(cap), Some(left)) => format!(
                "Metered data since {since}: {spent} of {} used, {} left.",
                human_bytes(cap),
                human_bytes(left)
            ),
            (Some(cap), None) => {
                format!(
                    "Metered data since {since}: {spent} of {} used.",
                    human_bytes(cap)
                )
            }
            (None, _) => format!("Metered data since {since}: {spent}, without a limit."),
        };
        let rule = match (cap, budget["cutoff"].as_str()) {
            (None, _) => "cedos budget set 2G sets a limit for a month.",
            (_, Some("soft")) => "At the limit a notice is shown; transfers continue.",
            (_, Some("cautious")) => {
                "Metered networks are not used beyond nine tenths of the limit."
            }
            _ => "Metered networks are not used beyond the limit.",
        };
        SpendingView {
            text,
            percent: cap.map(|cap| share(used, cap)),
            rule,
        }
    }
}

impl NetworkCard {
    fn of(link: &Value, transfers: &[Value]) -> NetworkCard {
        let text = |field: &str| {
            let text = link[field].as_str()?;
            Some(escape_controls(text).into_owned())
        };
        let device = text("link").unwrap_or_default();
        let state_text = match (link["usable"] == true, &link["carries"]) {
            (false, _) => "not usable now",
            (true, _) if link["portal"] == true => "requires a sign-in",
            (true, Value::Bool(false)) => "carries no data",
            (true, _) => "up",
        };
        let mut facts = Vec::new();
        let mut add = |label, text: Option<String>| {
            facts.extend(text.map(|text| PageFact::new(label, &text)));
        };
        add(
            "Device",
            Some(format!("{device}, {}", text("kind").unwrap_or_default())),
        );
        add("Cost", text("because"));
        let signal = link["signal_percent"].as_u64();
        add("Signal", signal.map(|percent| format!("{percent} %")));
        add("Operator", text("operator"));
        let rate = link["rate_bytes_per_s"].as_f64();
        add(
            "Rate",
            rate.map(|rate| format!("{}/s", human_bytes(rate as u64))),
        );
        let trip = link["rtt_ms"].as_f64();
        add("Round trip", trip.map(|ms| format!("{ms:.0} ms")));
        let udp = match link["udp"].as_str() {
            Some("blocked") => Some("blocked: packets go over TCP"),
            Some("intercepted") => Some("blocked: something else answers for the proxy"),
            _ => None,
        };
        add("UDP", udp.map(str::to_owned));
        let cap = &link["cap"];
        if let (Some(used), Some(cap)) = (cap["used"].as_u64(), cap["cap"].as_u64()) {
            let text = format!("{} of {} used", human_bytes(used), human_bytes(cap));
            add("This month", Some(text));
        }
        let ids = link["transfers"].as_array().into_iter().flatten();
        let carried = ids.filter_map(|id| {
            let transfer = transfers.iter().find(|transfer| transfer["id"] == *id)?;
            Some(CarriedTransfer {
                id: id.as_u64()?,
                name: name_of(transfer),
            })
        });
        NetworkCard {
            name: text("ssid").unwrap_or_else(|| device.clone()),
            class: text("class").unwrap_or_default(),
            state_text,
            facts,
            carries: carried.collect(),
            device,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn spending_says_what_is_left_and_what_happens_at_the_limit() {
        let view = SpendingView::of(&json!({
            "cap": 2_000_000_000_u64, "used": 500_000_000, "left": 1_500_000_000, "since": "2030-01-01",
            "cutoff": "hard",
        }));
        assert_eq!(
            view.text,
            "Metered data since 2030-01-01: 500.00 MB of 2.00 GB used, 1.50 GB left."
        );
        assert_eq!(view.percent, Some(25));
        assert!(view.rule.contains("not used beyond"));
        let free = SpendingView::of(&json!({"cap": null, "used": 0, "since": "2030-01-01"}));
        assert!(
            free.text.ends_with("0 B, without a limit."),
            "{}",
            free.text
        );
        assert_eq!(free.percent, None);
    }

    #[test]
    fn a_network_names_what_it_carries_and_why_it_costs() {
        let link = json!({
            "link": "wlan0", "kind": "wifi", "class": "free", "because": "Wi-Fi", "usable": true,
            "carries": false, "ssid": "<b>home</b>", "transfers": [3], "portal": false,
        });
        let card = NetworkCard::of(&link, &[json!({"id": 3, "file": "/a/film.mp4"})]);
        assert_eq!(
            (&*card.name, card.state_text),
            ("<b>home</b>", "carries no data")
        );
        assert_eq!(card.carries[0].name, "film.mp4");
        let live = NetworksLive {
            base: "/t".into(),
            spending: SpendingView::of(&Value::Null),
            networks: vec![card],
        };
        let html = live.render().unwrap();
        assert!(!html.contains("<b>"), "{html}");
        assert!(html.contains("href=\"/t/transfer/3\""), "{html}");
    }
}
