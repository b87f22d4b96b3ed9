// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package stepaside

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/durable"
)

// The reasons for which the driver is not open, in a word, for taints, conditions and events.
const (
	// Released: somebody wants the driver for himself.
	Released = "DriverReleased"
	// Replaced: a process that has loaded the driver's library before has another one than a new process would have.
	Replaced = "DriverReplaced"
)

// Why is the reason for which the agent keeps off the driver. It is an error of who needs the driver, and passes.
type Why struct{ Reason, Message string }

func (w *Why) Error() string { return w.Message }

// Options of a Keeper.
type Options struct {
	Clock clock.WithTicker
	// Dir is the folder in which requests stand, see [Dir]. Agents of one node share it.
	Dir string
	// Node returns the agent's own Node, as it is known without a request wherever that can be: it is called each second. It may be nil:
	// then only the node itself is asked.
	Node func(context.Context) (*corev1.Node, error)
	// Elsewhere says where the driver is now, if that is another place than this process has looked at, and empty otherwise. It may be nil.
	Elsewhere func() string
	// Returned tells that this process has come in the place of one that had stepped aside.
	Returned bool
	// Opens returns nil if another process that begins now can open the driver. It ends when ctx does.
	Opens func(context.Context) error
}

// Driver is who has the driver open.
type Driver interface {
	// Aside is told why nothing may begin any more, and each time that is said in other words. It does not block.
	Aside(ctx context.Context, why *Why)
	// Close closes all that is open of the driver, and returns nil once that is done. Otherwise, at the latest when ctx ends, it says what is
	// waited for; it is called again then.
	Close(ctx context.Context) error
}

// Keeper decides whether the driver may be open. Methods of a nil one always let. They may be called concurrently.
type Keeper struct {
	opts Options
	// changed asks for a look at once.
	changed chan struct{}
	// told is what Run has told last.
	told string

	mu sync.Mutex
	// node is what the Node asked for when it was last read, by this agent or one before.
	node []string
	// replaced says what is wrong with the library that this process has loaded; empty if nothing is.
	replaced string
	// library is the file that was loaded.
	library *file
	// why is nil until the agent steps aside, and then never again: it comes back as a new process.
	why *Why
	// acts are under way, by what they are.
	acts map[string]int
	// ended is closed when an act has ended; nil if nobody waits for that.
	ended chan struct{}
}

// New returns a Keeper that knows what was asked of an agent before. Nothing is looked at before Begin.
func New(opts Options) *Keeper {
	return &Keeper{opts: opts, changed: make(chan struct{}, 1), node: noted(opts.Dir), acts: map[string]int{}}
}

const (
	// lookInterval is how often it is looked at what costs a system call, and at what is known of the Node: who pauses its clients by the
	// labels waits for nobody whom it does not know.
	lookInterval = time.Second
	// nodeTimeout is for one reading of the Node.
	nodeTimeout = 4 * time.Second
	// actsTimeout is how long acts have to come to their end before the driver is closed under them: longer than any call of the kubelet.
	actsTimeout = time.Minute
	// tellInterval is how often it is said what is waited for.
	tellInterval = 5 * time.Second
	// opensInterval is how often it is tried whether a new process can open the driver, and opensTimeout how long that may take.
	opensInterval = 10 * time.Second
	opensTimeout  = time.Minute
)

// Why is nil as long as the driver may be open.
func (k *Keeper) Why() *Why {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.why
}

// Returned tells that this process has come in the place of one that had stepped aside.
func (k *Keeper) Returned() bool { return k != nil && k.opts.Returned }

// Begin is to be called by who needs the driver for several steps, and is waited for until done is called. The error is a *Why.
func (k *Keeper) Begin(what string) (done func(), err error) {
	if k == nil {
		return func() {}, nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.why != nil {
		return nil, k.why
	}
	k.acts[what]++
	return sync.OnceFunc(func() { k.end(what) }), nil
}

func (k *Keeper) end(what string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.acts[what]--; k.acts[what] == 0 {
		delete(k.acts, what)
	}
	if k.ended != nil {
		close(k.ended)
		k.ended = nil
	}
}

// Enter is to be called before the driver is opened with that library, and leave when it is closed. The error is a *Why.
//
// Who asks for the driver writes that down and then tries for the lock, so one of the two sees the other.
func (k *Keeper) Enter(ctx context.Context, library string) (leave func(), err error) {
	if k == nil {
		return func() {}, nil
	}
	leave, err = share(k.opts.Dir, openLock)
	if err != nil {
		// Without a folder to write in nobody can ask there either.
		klog.FromContext(ctx).Error(err, "Who waits for the driver does not see that the agent has it open")
		leave = func() {}
	}
	if why := k.look(); why != nil {
		leave()
		return nil, why
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.library == nil && filepath.IsAbs(library) {
		k.library = fileAt(library)
	}
	return leave, nil
}

// NotLoaded is to be called when the library that Enter was told of could not be loaded, as while it is being installed:
// the next one can be another file.
func (k *Keeper) NotLoaded() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.library = nil
}

// Replaced is to be called when the library that this process has loaded is of another version than the kernel's driver.
// The error is a *Why that wraps err's text.
func (k *Keeper) Replaced(err error) error {
	if k == nil {
		return err
	}
	k.mu.Lock()
	k.replaced = err.Error()
	k.mu.Unlock()
	return k.look()
}

func (k *Keeper) poke() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// look returns why the driver must not be open, as far as that is known on the node itself. It is what Why is from then on.
func (k *Keeper) look() *Why {
	asked := k.asked()
	elsewhere := ""
	if k.opts.Elsewhere != nil {
		elsewhere = k.opts.Elsewhere()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.replaced == "" && k.library != nil {
		k.replaced = k.library.changed()
	}
	if k.why == nil {
		defer func() {
			if k.why != nil {
				k.poke()
			}
		}()
	}
	switch {
	case len(asked) > 0:
		k.why = &Why{Released, "the NVIDIA driver is released: " + strings.Join(asked, "; ")}
	case k.replaced != "":
		k.why = &Why{Replaced, "the NVIDIA driver was replaced: " + k.replaced}
	case elsewhere != "":
		k.why = &Why{Replaced, "the NVIDIA driver has come, in " + elsewhere + " of the host"}
	case k.why != nil:
		k.why = &Why{Released, "the NVIDIA driver was released, and nobody asks for it any more"}
	}
	return k.why
}

// asked are the requests that stand, the command's first.
func (k *Keeper) asked() (requests []string) {
	if request := commandsRequest(k.opts.Dir); request != "" {
		requests = append(requests, request)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return append(requests, k.node...)
}

// Start finds out what is asked for before the driver is opened for the first time. Where the API server does not answer
// it is what an agent before was told.
func (k *Keeper) Start(ctx context.Context) {
	if err := k.readNode(ctx); err != nil {
		klog.FromContext(ctx).Info("The Node cannot be read: the driver is released if it was when the Node was last read", "reason", err.Error())
	}
	k.look()
}

// readNode notes what the Node asks for before anything follows from it.
func (k *Keeper) readNode(ctx context.Context) error {
	if k.opts.Node == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	node, err := k.opts.Node(ctx)
	if err != nil {
		return err
	}
	requests := nodesRequests(node)
	k.mu.Lock()
	known := k.node
	k.mu.Unlock()
	if slices.Equal(known, requests) {
		return nil
	}
	if err := note(k.opts.Dir, requests); err != nil {
		klog.FromContext(ctx).Error(err, "What the Node asks for is not known to an agent that starts while the API server is away")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.node = requests
	return nil
}

// ErrAnew ends Run: the process is to begin anew.
var ErrAnew = errors.New("the NVIDIA driver can be opened by a new process: the agent begins anew")

// Run keeps the driver closed while it has to be. It returns nil when ctx ends, and ErrAnew when the agent has to come
// back as a new process.
func (k *Keeper) Run(ctx context.Context, d Driver) error {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "stepaside"))
	watch := &watch{keeper: k, ticker: k.opts.Clock.NewTicker(lookInterval)}
	defer watch.ticker.Stop()
	// 1. Is there a reason to step aside?
	for k.Why() == nil {
		if !watch.next(ctx) {
			return nil
		}
	}
	// 2. Nothing begins any more; what is under way ends; then all is closed.
	if !k.letGo(ctx, d, watch) {
		return nil
	}
	// 3. Does nobody want the driver for himself, and can another process open it?
	for {
		if len(k.asked()) == 0 {
			err := k.opens(ctx, d, watch)
			// Asked once more: the new process would close it again.
			if err == nil && len(k.asked()) == 0 {
				return ErrAnew
			}
			if err != nil && ctx.Err() == nil {
				k.tell(ctx, d, fmt.Sprintf("; a new process cannot open it yet: %v", err))
			}
		} else {
			watch.tried = time.Time{}
			k.tell(ctx, d, "")
		}
		if !watch.next(ctx) {
			return nil
		}
	}
}

// letGo returns true once all is closed, and false when ctx ends.
func (k *Keeper) letGo(ctx context.Context, d Driver, w *watch) bool {
	logger := klog.FromContext(ctx)
	begun := k.opts.Clock.Now()
	if leave, err := share(k.opts.Dir, passingLock); err != nil {
		logger.Error(err, "Who waits for the driver to be opened again does not see that the agent closes it")
	} else {
		defer leave()
	}
	k.tell(ctx, d, "")
	waitsFor(k.opts.Dir, "")
	for k.opts.Clock.Since(begun) < actsTimeout {
		acts, ended := k.underWay()
		if acts == "" {
			break
		}
		k.stillOpen(ctx, d, acts)
		select {
		case <-ctx.Done():
			return false
		case <-k.opts.Clock.After(tellInterval):
		case <-ended:
		}
		w.readNode(ctx)
	}
	for {
		soon, cancel := context.WithTimeout(ctx, tellInterval)
		err := d.Close(soon)
		cancel()
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			break
		}
		k.stillOpen(ctx, d, err.Error())
		if !w.next(ctx) {
			return false
		}
	}
	waitsFor(k.opts.Dir, "")
	k.tell(ctx, d, "")
	logger.Info("The agent has closed the driver", "took", k.opts.Clock.Since(begun))
	return true
}

func (k *Keeper) stillOpen(ctx context.Context, d Driver, what string) {
	waitsFor(k.opts.Dir, what)
	k.tell(ctx, d, "; the agent still has it open, for "+what)
}

// underWay names the acts that are; ended is closed when one is not any more.
func (k *Keeper) underWay() (acts string, ended <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended == nil {
		k.ended = make(chan struct{})
	}
	return strings.Join(slices.Sorted(maps.Keys(k.acts)), ", "), k.ended
}

// tell says why, with what there is to add.
func (k *Keeper) tell(ctx context.Context, d Driver, more string) {
	why := *k.look()
	why.Message += more
	if why.Message != k.told {
		k.told = why.Message
		klog.FromContext(ctx).Info("The agent keeps off the driver", "reason", why.Reason, "message", why.Message)
	}
	d.Aside(ctx, &why)
}

// opens tries whether a new process can open the driver. It is given up when somebody wants the driver meanwhile.
func (k *Keeper) opens(ctx context.Context, d Driver, w *watch) error {
	if !w.due(opensInterval) {
		return w.said
	}
	try, cancel := context.WithTimeout(ctx, opensTimeout)
	defer cancel()
	leave, err := share(k.opts.Dir, passingLock)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		defer leave()
		if len(k.asked()) > 0 { // who asks now sees the lock, or is seen
			done <- errors.New("somebody wants it")
			return
		}
		done <- k.opts.Opens(try)
	}()
	hangs := false
	for {
		select {
		case err := <-done:
			w.tried, w.said = k.opts.Clock.Now(), err
			if hangs {
				waitsFor(k.opts.Dir, "")
			}
			return err
		case <-w.ticker.C():
			w.readNode(ctx)
			if len(k.asked()) > 0 {
				cancel()
			}
			// It is killed, and does not die while it is in a call of the kernel's driver.
			if hangs = try.Err() != nil && ctx.Err() == nil; hangs {
				k.stillOpen(ctx, d, "the try of a new process")
			}
		}
	}
}

// watch looks again and again whether something has changed.
type watch struct {
	keeper *Keeper
	ticker clock.Ticker
	// failed is why the Node could not be read.
	failed string
	// tried is when it was last tried to open the driver, and said what came of it.
	tried time.Time
	said  error
}

func (w *watch) due(interval time.Duration) bool {
	return w.keeper.opts.Clock.Since(w.tried) >= interval
}

// next waits for the next look, and looks. It returns false when ctx ends.
func (w *watch) next(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-w.ticker.C():
	case <-w.keeper.changed:
	}
	w.readNode(ctx)
	w.keeper.look()
	return ctx.Err() == nil
}

// readNode reads the Node. What cannot be read is as it was.
func (w *watch) readNode(ctx context.Context) {
	err := w.keeper.readNode(ctx)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != w.failed && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Whether the Node asks for the driver cannot be read", "reason", text)
	}
	w.failed = text
}

// Dir is the folder below an agent's state folder in which requests stand.
func Dir(stateDir string) string { return filepath.Join(stateDir, "driver") }

// The locks of who has the driver open, and of who has it for a while only: to close it, or to try whether it opens.
const (
	openLock    = "lock"
	passingLock = "passing"
)

// share says to who waits for the driver that this process has it open, until leave is called.
func share(dir, lock string) (leave func(), err error) {
	if err := (durable.OS{}).MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
	defer cancel()
	return durable.Share(ctx, filepath.Join(dir, lock))
}
