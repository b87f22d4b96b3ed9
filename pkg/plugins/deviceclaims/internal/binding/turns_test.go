// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"context"
	"testing"
)

// Who waits for its turn can be told to give up, and then is in nobody's way.
func TestATurnThatIsGivenUpIsNoTurn(t *testing.T) {
	turns := newTurns()
	done, err := turns.take(context.Background(), "claim")
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := turns.take(ended, "claim"); err == nil {
		t.Error("two have the turn at one claim")
	}
	done()
	done, err = turns.take(context.Background(), "claim")
	if err != nil {
		t.Fatal(err)
	}
	done()
	if len(turns.claims) != 0 {
		t.Errorf("%d claims are remembered", len(turns.claims))
	}
}
