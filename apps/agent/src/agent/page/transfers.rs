//! The pages of transfers: the list, and one transfer with all that is known of it.

use std::future::ready;
use std::sync::Arc;

use askama::Template;
use axum::Form;
use axum::Router;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use jiff::Zoned;
use serde::Deserialize;

use super::super::api::TermsChange;
use super::super::queue::TransferIntent;
use super::frame::{self, PageContext, PageFact, PageFrame};
use super::live;
use super::networks::SpendingView;
use super::transfer_card::{TransferCard, facts_of};
use crate::fetch::deadline_text::parse_deadline;
use crate::fetch::outcome::TransferFailure;

/// The routes of these pages.
pub(super) fn routes() -> Router<PageContext> {
    Router::new()
        .route("/", get(list))
        .route("/updates", get(list_updates))
        .route("/clear", post(clear))
        .route("/transfer/{id}", get(one).post(act))
        .route("/transfer/{id}/updates", get(one_updates))
}

#[derive(Template)]
#[template(path = "transfers.html")]
struct TransfersPage {
    frame: PageFrame,
    live: TransfersLive,
}

#[derive(Template)]
#[template(path = "transfers_live.html")]
struct TransfersLive {
    base: Arc<str>,
    spending: String,
    going_on: Vec<TransferCard>,
    ended: Vec<TransferCard>,
}

#[derive(Template)]
#[template(path = "transfer.html")]
struct TransferPage {
    frame: PageFrame,
    live: TransferLive,
}

#[derive(Template)]
#[template(path = "transfer_live.html")]
struct TransferLive {
    base: Arc<str>,
    transfer: TransferCard,
    facts: Vec<PageFact>,
}

/// The form of a transfer's buttons.
#[derive(Debug, Deserialize)]
struct TransferForm {
    /// The value of the button.
    #[serde(rename = "do")]
    action: TransferAction,
    /// The new deadline, as it was written.
    #[serde(default)]
    by: String,
    /// The page that the form is on.
    #[serde(default)]
    page: FormPage,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum TransferAction {
    Pause,
    Resume,
    Cancel,
    Retry,
    AnyNetwork,
    Deadline,
    NoDeadline,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FormPage {
    #[default]
    List,
    Transfer,
}

impl TransfersLive {
    fn of(context: &PageContext) -> TransfersLive {
        let now = Zoned::now();
        let cards = context.agent.list();
        let mut cards: Vec<_> = cards
            .iter()
            .map(|value| TransferCard::of(value, &now))
            .collect();
        // The newest first, as what somebody just asked for is looked for first.
        cards.reverse();
        let (going_on, ended) = cards.into_iter().partition(|card| card.is_unfinished);
        TransfersLive {
            base: context.base.clone(),
            spending: SpendingView::of(&context.agent.budget()).text,
            going_on,
            ended,
        }
    }
}

impl TransferLive {
    fn of(context: &PageContext, id: u64) -> Result<TransferLive, TransferFailure> {
        let (transfer, now) = (context.agent.show(id)?, Zoned::now());
        Ok(TransferLive {
            base: context.base.clone(),
            transfer: TransferCard::of(&transfer, &now),
            facts: facts_of(&transfer, &now),
        })
    }
}

fn frame_of(context: &PageContext) -> PageFrame {
    PageFrame {
        base: context.base.clone(),
        section: "",
    }
}

async fn list(State(context): State<PageContext>) -> Response {
    frame::html(&TransfersPage {
        frame: frame_of(&context),
        live: TransfersLive::of(&context),
    })
}

async fn list_updates(State(context): State<PageContext>) -> Response {
    let view = context.clone();
    live::updates(&context, move || ready(Some(TransfersLive::of(&view)))).into_response()
}

async fn one(State(context): State<PageContext>, Path(id): Path<u64>) -> Response {
    match TransferLive::of(&context, id) {
        Ok(live) => frame::html(&TransferPage {
            frame: frame_of(&context),
            live,
        }),
        Err(failure) => frame::problem(&context, &failure),
    }
}

async fn one_updates(State(context): State<PageContext>, Path(id): Path<u64>) -> Response {
    // An event stream that ends at once would be asked for again and again.
    if let Err(failure) = context.agent.show(id) {
        return frame::problem(&context, &failure);
    }
    let view = context.clone();
    live::updates(&context, move || ready(TransferLive::of(&view, id).ok())).into_response()
}

async fn clear(State(context): State<PageContext>) -> Response {
    match context.agent.clear() {
        Ok(_) => Redirect::to(&format!("{}/", context.base)).into_response(),
        Err(failure) => frame::problem(&context, &failure),
    }
}

async fn act(
    State(context): State<PageContext>,
    Path(id): Path<u64>,
    Form(form): Form<TransferForm>,
) -> Response {
    let agent = &context.agent;
    let edited = |change: Result<TermsChange, TransferFailure>| agent.edit(id, &change?);
    let done = match form.action {
        TransferAction::Pause => agent.set_intent(id, TransferIntent::Pause),
        TransferAction::Cancel => agent.set_intent(id, TransferIntent::Cancel),
        TransferAction::Resume => agent.resume(id, false),
        TransferAction::Retry => agent.resume(id, true),
        TransferAction::AnyNetwork => edited(Ok(TermsChange {
            policy: Some("any".to_owned()),
            ..TermsChange::default()
        })),
        TransferAction::Deadline => edited(deadline(&form.by)),
        TransferAction::NoDeadline => edited(Ok(TermsChange {
            no_deadline: true,
            ..TermsChange::default()
        })),
    };
    match (done, form.page) {
        (Ok(_), FormPage::List) => Redirect::to(&format!("{}/", context.base)).into_response(),
        (Ok(_), FormPage::Transfer) => {
            Redirect::to(&format!("{}/transfer/{id}", context.base)).into_response()
        }
        (Err(failure), _) => frame::problem(&context, &failure),
    }
}

fn deadline(by: &str) -> Result<TermsChange, TransferFailure> {
    let deadline = parse_deadline(by, &Zoned::now()).map_err(TransferFailure::usage)?;
    Ok(TermsChange {
        deadline: Some(deadline),
        ..TermsChange::default()
    })
}
