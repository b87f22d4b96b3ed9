package deviceclaims

import (
	"context"
	"time"

	"k8s.io/client-go/tools/events"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/tracker"
)

// binder writes claims for one profile. What profiles share is in books.
type binder struct {
	*books
	client kubernetes.Interface
	clock  clock.Clock
	events func() events.EventRecorderLogger
	// conditions tells whether devices may have binding conditions (KEP-5007), timeout how long they may take.
	conditions bool
	timeout    time.Duration
	// bindPauses are those between conflicts of a binding, undoPauses those of what is taken back.
	bindPauses, undoPauses wait.Backoff
	// grace is how long a binding of a pod without an answer is given to take effect.
	grace time.Duration
}

// books are what all profiles of a scheduler know of the claims that it writes.
type books struct {
	// fieldManager is the name under which this process, and no other, writes to claims.
	fieldManager string
	claims       *tracker.Tracker
	// places are the pods that are about to be users of claims, turns whose turn it is to write to one.
	places *places
	turns  *turns
	// doubts are the claims that may still lose what a pod is about to use.
	doubts *doubts
	// changed returns a channel that is closed with the next event of a claim.
	changed func(claim types.NamespacedName) <-chan struct{}
	// ended is the context of the scheduler.
	ended context.Context //nolint:containedctx // of the process
}

// newBooks returns the books of a scheduler.
func newBooks(ended context.Context, claims *tracker.Tracker, changed func(types.NamespacedName) <-chan struct{}) *books {
	return &books{
		fieldManager: newFieldManager(), claims: claims, changed: changed, ended: ended,
		places: newPlaces(claims.Get), turns: newTurns(), doubts: newDoubts(claims.Get),
	}
}

// newBinder returns the binder of one profile.
func newBinder(books *books, handle fwk.Handle, conditions bool, timeout time.Duration) *binder {
	return &binder{
		books: books, client: handle.ClientSet(), clock: clock.RealClock{}, events: handle.EventRecorder,
		conditions: conditions, timeout: timeout, bindPauses: bindPauses, undoPauses: undoPauses, grace: bindingGrace,
	}
}

// remembered is how many claims somebody is about to use or to write: none while no pod is being bound.
func (b *books) remembered() int {
	b.places.mutex.Lock()
	defer b.places.mutex.Unlock()
	b.turns.mutex.Lock()
	defer b.turns.mutex.Unlock()
	return len(b.places.coming) + len(b.turns.claims)
}
