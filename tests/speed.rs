//! What makes the relay fast must not make it wrong.

use std::collections::BTreeMap;

use outbox_relay::config::TableName;
use outbox_relay::postgres::outbox::{Tables, taken_care_of};

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::scene::Scene;

/// Rows of which one in six is pending and free, and the others are all that a row can be otherwise.
const ROWS: &str = "
    INSERT INTO outbox_events (id, event_id, aggregate_type, aggregate_id, event_type, payload, status, next_retry_at)
    SELECT i, 'e' || i, 'order', 'a', 'paid', '{}',
      (ARRAY['pending', 'completed', 'failed', 'dead_letter', 'pending', 'processing'])[1 + i % 6],
      CASE i % 6 WHEN 2 THEN now() WHEN 4 THEN 'infinity' WHEN 5 THEN now() END
    FROM generate_series(1, 60) i;
    DELETE FROM outbox_events WHERE id % 7 = 0";

/// What a look-up of these rows must say: of each that is taken care of, whether it waits.
fn expected(asked: &[(i64, String)]) -> BTreeMap<i64, bool> {
    let there = asked.iter().filter(|(id, event_id)| id % 7 != 0 && *event_id == format!("e{id}"));
    there.filter(|(id, _)| id % 6 != 0).map(|(id, _)| (*id, [2, 4, 5].contains(&(id % 6)))).collect()
}

/// The rows are found by one walk along their range when they stand close together, and one by one otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_are_read_again_are_looked_up_right_in_either_way() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        scene.sql(ROWS).await;
        let tables = Tables::of(&"public.outbox_events".parse::<TableName>().unwrap());
        let close: Vec<i64> = (1..=60).rev().collect();
        let scattered: Vec<i64> = (1..=60).rev().filter(|id| id % 5 == 0 || *id < 9).chain([1_000_000]).collect();
        let ends: Vec<i64> = vec![55, 2, 59];
        for ids in [close, scattered, ends] {
            // The log told of other rows under some of the ids: the table was truncated and counts from one again.
            let name = |id: i64| if id % 4 == 0 { format!("of an earlier table {id}") } else { format!("e{id}") };
            let asked: Vec<(i64, String)> = ids.into_iter().map(|id| (id, name(id))).collect();
            let (ids, names): (Vec<i64>, Vec<&str>) = asked.iter().map(|(id, name)| (*id, &**name)).unzip();
            let found = taken_care_of(&scene.client, &tables, &ids, &names).await.unwrap();
            let count = found.len();
            let found: BTreeMap<i64, bool> = found.into_iter().collect();
            assert_eq!(found.len(), count, "each once");
            assert_eq!(found, expected(&asked));
            assert!(!found.is_empty());
        }
    }
}
