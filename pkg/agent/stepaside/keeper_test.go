// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package stepaside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/durable"
)

// host is a node with its API server and its driver. It is what agents that follow one another have in common.
type host struct {
	t   *testing.T
	ctx context.Context
	dir string

	mu   sync.Mutex
	node corev1.Node
	away bool
	// library is the path of the driver's.
	library string
	// opens is why a new process cannot open the driver; nil if it can. tries counts.
	opens error
	tries int
}

func newHost(t *testing.T) *host {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	h := &host{t: t, ctx: ctx, dir: filepath.Join(t.TempDir(), "driver"), library: filepath.Join(t.TempDir(), "libnvidia-ml.so.1")}
	h.install("old")
	return h
}

// install replaces the library, as a package manager does.
func (h *host) install(content string) {
	h.t.Helper()
	must(h.t, os.WriteFile(h.library+".new", []byte(content), 0o600))
	must(h.t, os.Rename(h.library+".new", h.library))
}

// set changes what the Node says, or how the host is.
func (h *host) set(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

func (h *host) annotate(value string) {
	h.set(func() { h.node.Annotations = map[string]string{Annotation: value} })
}

func (h *host) label(values ...string) {
	h.set(func() {
		h.node.Labels = map[string]string{}
		for i, value := range values {
			h.node.Labels[fmt.Sprintf("nvidia.com/gpu.deploy.part-%d", i)] = value
		}
	})
}

func (h *host) tried() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tries
}

// agent is one process.
type agent struct {
	*Keeper
	host *host
	stop context.CancelFunc
	// ended has what Run has returned.
	ended chan error

	mu sync.Mutex
	// said are the reasons that were told, without repetitions; leave is nil while the driver is not open, and holds says why
	// it cannot be closed.
	said  []string
	leave func()
	holds error
}

// start begins an agent that opens the driver if it may, and tells whether it did.
func (h *host) start() (a *agent, opened bool) {
	h.t.Helper()
	keeper := New(Options{
		Clock: clock.RealClock{},
		Dir:   h.dir,
		Node: func(context.Context) (*corev1.Node, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.away {
				return nil, errors.New("the API server is away")
			}
			return h.node.DeepCopy(), nil
		},
		Opens: func(context.Context) error {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.tries++
			return h.opens
		},
	})
	ctx, stop := context.WithCancel(h.ctx)
	a = &agent{Keeper: keeper, host: h, stop: stop, ended: make(chan error, 1)}
	keeper.Start(ctx)
	leave, err := keeper.Enter(ctx, h.library)
	if err == nil {
		a.leave = leave
	} else if why := (*Why)(nil); !errors.As(err, &why) {
		h.t.Errorf("the driver cannot be opened: %v", err)
	}
	go func() { a.ended <- keeper.Run(ctx, a) }()
	h.t.Cleanup(a.kill)
	return a, err == nil
}

// kill ends the process: the kernel takes its locks.
func (a *agent) kill() {
	a.stop()
	a.ended <- <-a.ended
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.leave != nil {
		a.leave()
		a.leave = nil
	}
}

func (a *agent) Aside(_ context.Context, why *Why) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if text := why.Reason + ": " + why.Message; len(a.said) == 0 || a.said[len(a.said)-1] != text {
		a.said = append(a.said, text)
	}
}

func (a *agent) Close(context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.holds != nil {
		return a.holds
	}
	if a.leave != nil {
		a.leave()
		a.leave = nil
	}
	return nil
}

func (a *agent) open() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leave != nil
}

// last is what was told last.
func (a *agent) last() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.said) == 0 {
		return ""
	}
	return a.said[len(a.said)-1]
}

// anew tells whether the agent has ended to begin anew.
func (a *agent) anew() bool {
	select {
	case err := <-a.ended:
		a.ended <- err
		return errors.Is(err, ErrAnew)
	default:
		return false
	}
}

func (a *agent) expect(when string, open, anew bool, said ...string) {
	a.host.t.Helper()
	synctest.Wait()
	if a.open() != open || a.anew() != anew {
		a.host.t.Errorf("%s: open %t, want %t; begins anew %t, want %t; told %q", when, a.open(), open, a.anew(), anew, a.last())
	}
	for _, text := range said {
		if !strings.Contains(a.last(), text) {
			a.host.t.Errorf("%s: told %q, want %q in it", when, a.last(), text)
		}
	}
	if len(said) == 0 && a.last() != "" {
		a.host.t.Errorf("%s: told %q, want nothing", when, a.last())
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// soon is enough for all that is to follow from what is seen, and long for a driver that does not open.
const (
	soon = 4 * lookInterval
	long = 10 * time.Minute
)

// A request closes the driver, and the agent comes back as a new process when it has ended. Each of the three is as good
// as the others, and two of them have to end both.
func TestTheDriverIsReleasedForAsLongAsSomebodyAsks(t *testing.T) {
	ask := map[string]func(h *host){
		"annotation": func(h *host) { h.annotate("new firmware") },
		"label":      func(h *host) { h.label("true", upgrading) },
		"command":    func(h *host) { _ = Ask(h.ctx, h.dir, "a reset") },
	}
	end := map[string]func(h *host){
		"annotation": func(h *host) { h.set(func() { h.node.Annotations = nil }) },
		"label":      func(h *host) { h.label("true", "true") },
		"command": func(h *host) {
			ctx, cancel := context.WithTimeout(h.ctx, time.Second)
			defer cancel()
			if err := End(ctx, h.dir); !errors.Is(err, ErrStillReleased) {
				h.t.Errorf("no agent has begun anew, and the command says: %v", err)
			}
		},
	}
	said := map[string]string{
		"annotation": `stowage.dev/release-driver: "new firmware"`,
		"label":      "nvidia.com/gpu.deploy.part-1: " + upgrading,
		"command":    "a reset",
	}
	for first := range ask {
		for second := range ask {
			t.Run(first+" and "+second, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					h := newHost(t)
					a, opened := h.start()
					if !opened {
						t.Fatalf("nobody asks: %v", a.Why())
					}
					time.Sleep(long)
					a.expect("before", true, false)
					ask[first](h)
					time.Sleep(soon)
					a.expect("asked once", false, false, Released, said[first])
					ask[second](h)
					time.Sleep(soon)
					a.expect("asked twice", false, false, Released, said[first], said[second])
					end[first](h)
					time.Sleep(soon)
					if first != second {
						a.expect("one of two has ended", false, false, Released, said[second])
						if strings.Contains(a.last(), said[first]) {
							t.Errorf("what has ended is told: %q", a.last())
						}
						if n := h.tried(); n > 0 {
							t.Errorf("the driver was tried %d times while somebody has it for himself", n)
						}
						end[second](h)
						time.Sleep(soon)
					}
					a.expect("ended", false, true, Released)
					_, opened = h.start()
					if !opened {
						t.Error("the new process does not open the driver")
					}
				})
			})
		}
	}
}

// The library is another file, or the kernel's driver another one: this process can do nothing with either. A new one
// takes its place as soon as it can do more, and not before: it would end again and again.
func TestAReplacedDriverMakesAWayForANewProcess(t *testing.T) {
	replace := map[string]func(h *host, a *agent){
		"another file":  func(h *host, _ *agent) { h.install("new") },
		"no file":       func(h *host, _ *agent) { must(h.t, os.Remove(h.library)) },
		"other version": func(_ *host, a *agent) { _ = a.Replaced(errors.New("mismatch of versions")) },
	}
	said := map[string]string{"another file": "is another file", "no file": "is gone", "other version": "mismatch of versions"}
	for name, happens := range replace {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHost(t)
				a, _ := h.start()
				time.Sleep(soon)
				h.set(func() { h.opens = errors.New("the module is the old one") })
				happens(h, a)
				time.Sleep(soon)
				a.expect("replaced", false, false, Replaced, said[name], "the module is the old one")
				time.Sleep(long)
				a.expect("a while later", false, false, Replaced, said[name], "the module is the old one")
				if n := h.tried(); n < 30 || n > 70 {
					t.Errorf("a new process was tried %d times in %s, want about one in %s", n, long, opensInterval)
				}
				h.set(func() { h.opens = nil })
				time.Sleep(opensInterval + soon)
				a.expect("loaded", false, true, Replaced)
			})
		})
	}
}

// An upgrade with the annotation set: the library is replaced meanwhile, and when nobody asks any more the driver is not there yet.
func TestAnUpgradeWhileTheDriverIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		a, _ := h.start()
		h.annotate("upgrade")
		time.Sleep(soon)
		a.expect("asked", false, false, Released)
		h.set(func() { h.opens = errors.New("no module is loaded") })
		h.install("new")
		time.Sleep(long)
		a.expect("replaced, too", false, false, Released, "upgrade")
		if n := h.tried(); n > 0 {
			t.Errorf("the driver was tried %d times while somebody has it for himself", n)
		}
		h.annotate("false")
		time.Sleep(long)
		a.expect("not loaded yet", false, false, Replaced, "another file", "no module is loaded")
		h.set(func() { h.opens = nil })
		time.Sleep(opensInterval + soon)
		a.expect("loaded", false, true, Replaced)
	})
}

// Somebody asks while it is tried whether a new process can open the driver: the try ends, and the agent stays aside.
func TestARequestEndsTheTryOfANewProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		a, _ := h.start()
		var cut atomic.Bool
		a.opts.Opens = func(ctx context.Context) error {
			<-ctx.Done()
			cut.Store(true)
			return nil // it was about to
		}
		h.install("new")
		time.Sleep(soon)
		a.expect("replaced", false, false, Replaced)
		h.label("paused-for-driver-upgrade")
		time.Sleep(soon)
		if !cut.Load() {
			t.Error("the try goes on beside who wants the driver for himself")
		}
		a.expect("asked", false, false, Released, "paused-for-driver-upgrade")
		a.kill()
	})
}

// Who asks is told that nobody has the driver open only when the try has ended, too.
func TestWhoAsksWaitsForTheTryOfANewProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		a, _ := h.start()
		var ended atomic.Bool
		a.opts.Opens = func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(3 * time.Second) // it is killed, and the kernel takes its time
			ended.Store(true)
			return ctx.Err()
		}
		h.install("new")
		time.Sleep(soon)
		impatient, cancel := context.WithTimeout(h.ctx, 2*time.Second)
		defer cancel()
		const try = "for the try of a new process"
		if err := Ask(impatient, h.dir, "a reset"); !errors.Is(err, ErrStillOpen) || !strings.HasSuffix(err.Error(), try) {
			t.Errorf("who asks is told %v", err)
		}
		a.expect("a try that hangs", false, false, Released, "a reset", try)
		must(t, Ask(h.ctx, h.dir, ""))
		if !ended.Load() {
			t.Error("a process that is tried still has the driver open")
		}
		time.Sleep(soon)
		if _, err := os.Stat(waitsPath(h.dir)); err == nil || strings.Contains(a.last(), try) {
			t.Errorf("afterwards it is still said to be waited for: %q", a.last())
		}
		a.kill()
	})
}

// Whoever is at work goes on until the end, and is named; whoever comes is told why not.
func TestWhatIsUnderWayIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		a, _ := h.start()
		var done []func()
		for _, act := range []string{"the preparation of claim a/one", "the preparation of claim b/two", "the preparation of claim b/two"} {
			end, err := a.Begin(act)
			must(t, err)
			done = append(done, end)
		}
		asked := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(h.ctx, 20*time.Second)
			defer cancel()
			asked <- Ask(ctx, h.dir, "")
		}()
		time.Sleep(soon)
		a.expect("at work", true, false, Released, "still has it open, for the preparation of claim a/one, the preparation of claim b/two")
		var why *Why
		if _, err := a.Begin("another one"); !errors.As(err, &why) || !strings.Contains(err.Error(), "release-driver") {
			t.Errorf("who comes later is told %v", err)
		}
		done[0]()
		done[0]() // once is enough
		done[1]()
		time.Sleep(soon)
		a.expect("one is left", true, false, Released, "still has it open, for the preparation of claim b/two")
		if err := <-asked; !errors.Is(err, ErrStillOpen) || !strings.HasSuffix(err.Error(), "for the preparation of claim b/two") {
			t.Errorf("who waits is told %v", err)
		}
		done[2]()
		time.Sleep(time.Second)
		a.expect("all have ended", false, false, Released)
		if strings.Contains(a.last(), "still") {
			t.Errorf("told %q of a driver that is closed", a.last())
		}
		must(t, Ask(h.ctx, h.dir, "again"))
		a.kill()
	})
}

// Who does not come to an end is waited for, and named for as long; acts at last have the driver closed under them.
func TestWhatHangsIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		a, _ := h.start()
		if _, err := a.Begin("the preparation of claim a/one"); err != nil {
			t.Fatal(err)
		}
		a.mu.Lock()
		a.holds = errors.New("an act on gpu-0")
		a.mu.Unlock()
		h.annotate("")
		time.Sleep(actsTimeout / 2)
		a.expect("an act", true, false, "for the preparation of claim a/one")
		time.Sleep(actsTimeout)
		a.expect("a call", true, false, "for an act on gpu-0")
		h.set(func() { h.node.Annotations = nil })
		time.Sleep(long)
		a.expect("nobody waits any more", true, false, "nobody asks for it any more", "for an act on gpu-0")
		if n := h.tried(); n > 0 {
			t.Errorf("a new process was tried %d times while this one has the driver open", n)
		}
		a.mu.Lock()
		a.holds = nil
		a.mu.Unlock()
		time.Sleep(soon)
		a.expect("the call has returned", false, true, Released)
	})
}

// An agent that dies at any point is followed by one that does not open the driver while somebody asks for it, with the
// API server or without it.
func TestARequestOutlivesTheAgent(t *testing.T) {
	for name, ask := range map[string]func(h *host){
		"annotation": func(h *host) { h.annotate("") },
		"label":      func(h *host) { h.label("paused-for-mig-change", "paused-for-mig-change") },
		"command": func(h *host) {
			must(h.t, os.MkdirAll(h.dir, 0o700))
			must(h.t, os.WriteFile(requestPath(h.dir), []byte("{}"), 0o600))
		},
	} {
		for _, away := range []bool{false, true} {
			for after := time.Duration(0); after <= soon; after += soon / 6 {
				t.Run(fmt.Sprintf("%s, API server away %t, killed after %s", name, away, after), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						h := newHost(t)
						first, _ := h.start()
						end, err := first.Begin("something")
						must(t, err)
						ask(h)
						time.Sleep(after)
						seen := first.Why() != nil
						if after > soon/2 {
							end()
							time.Sleep(after)
						}
						first.kill()
						h.set(func() { h.away = away })
						second, opened := h.start()
						if opened != (away && !seen && name != "command") {
							t.Errorf("the next agent opens the driver: %t, why %v", opened, second.Why())
						}
						second.kill()
					})
				})
			}
		}
	}
}

// What cannot be read asks: who has written it relies on it.
func TestARequestThatCannotBeReadStands(t *testing.T) {
	for _, path := range []func(string) string{requestPath, notePath} {
		h := newHost(t)
		must(t, os.MkdirAll(h.dir, 0o700))
		must(t, os.WriteFile(path(h.dir), []byte("{"), 0o600))
		h.away = true
		a, opened := h.start()
		if opened || a.Why() == nil || !strings.Contains(a.Why().Message, "cannot be read") {
			t.Errorf("%s: opened %t, why %v", filepath.Base(path("")), opened, a.Why())
		}
		a.kill()
	}
}

// upgrading is the value of the GPU operator's labels while it upgrades the driver.
const upgrading = "paused-for-driver-upgrade"

func TestWhatANodeAsksFor(t *testing.T) {
	const pause, other = "nvidia.com/gpu.deploy.dcgm", "nvidia.com/gpu.deploy.device-plugin"
	for name, tc := range map[string]struct {
		annotations, labels map[string]string
		want                []string
	}{
		"nothing":                        {labels: map[string]string{pause: "true", other: "false", "nvidia.com/gpu.present": "true"}},
		"an upgrade":                     {labels: map[string]string{pause: upgrading, other: "true"}, want: []string{pause + ": " + upgrading}},
		"partitions":                     {labels: map[string]string{other: "paused-for-mig-change"}, want: []string{other + ": paused-for-mig"}},
		"a value that is kept":           {labels: map[string]string{pause: "custom_" + upgrading}, want: []string{"custom_" + upgrading}},
		"all parts":                      {labels: map[string]string{pause: upgrading, other: upgrading}, want: []string{pause}},
		"a part that the node never had": {labels: map[string]string{pause: "", other: "false"}},
		"somebody else's label":          {labels: map[string]string{"example.com/gpu.deploy.dcgm": "paused-for-driver-upgrade"}},
		"the annotation":                 {annotations: map[string]string{Annotation: "firmware"}, want: []string{`"firmware"`}},
		"the annotation, without words":  {annotations: map[string]string{Annotation: ""}, want: []string{Annotation}},
		"the annotation, ended":          {annotations: map[string]string{Annotation: "false"}},
		"both": {
			annotations: map[string]string{Annotation: "true"}, labels: map[string]string{pause: "paused-for-x"}, want: []string{Annotation, pause},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := nodesRequests(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: tc.annotations, Labels: tc.labels}})
			if len(got) != len(tc.want) {
				t.Fatalf("%q, want %q", got, tc.want)
			}
			for i, want := range tc.want {
				if !strings.Contains(got[i], want) {
					t.Errorf("%q, want %q in it", got[i], want)
				}
			}
		})
	}
}

// Each claim that is refused and each device's health have the words in them, however many they are.
func TestManyWordsAreShortened(t *testing.T) {
	h := newHost(t)
	words := strings.Repeat("ü ", 80<<10)
	must(t, change(h.dir, func() error {
		data, err := json.Marshal(request{For: words})
		return errors.Join(err, os.WriteFile(requestPath(h.dir), data, 0o600))
	}))
	h.annotate("\x00" + words)
	a, _ := h.start()
	if text := a.Why().Error(); len(text) > 3*maxWords || !utf8.ValidString(text) || strings.Count(text, "ü …") != 2 {
		t.Errorf("%d bytes, valid %t: %.2000s", len(text), utf8.ValidString(text), text)
	}
	a.kill()
}

// A file is another one however it was changed; one that cannot be looked at is not known to be.
func TestAFileThatChanges(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(path string) error
		want   string
	}{
		"not":  {func(string) error { return nil }, ""},
		"read": {func(path string) error { _, err := os.ReadFile(path); return err }, ""},
		"replaced": {func(path string) error {
			return errors.Join(os.WriteFile(path+"2", []byte("old"), 0o600), os.Rename(path+"2", path))
		}, "another file"},
		"written in place": {func(path string) error { return os.WriteFile(path, []byte("newer"), 0o600) }, "another file"},
		"of another size, of the same time": {func(path string) error {
			info, err := os.Stat(path)
			return errors.Join(err, os.WriteFile(path, []byte("newer"), 0o600), os.Chtimes(path, time.Time{}, info.ModTime()))
		}, "another file"},
		"touched":          {func(path string) error { return os.Chtimes(path, time.Time{}, time.Unix(1, 0)) }, "another file"},
		"removed":          {os.Remove, "gone"},
		"its folder moved": {func(path string) error { return os.Rename(filepath.Dir(path), filepath.Dir(path)+"2") }, "gone"},
		"the link's target": {func(path string) error {
			return errors.Join(os.Remove(path), os.WriteFile(path+".2", []byte("old"), 0o600), os.Symlink(path+".2", path))
		}, "another file"},
		"no folder": {func(path string) error {
			return errors.Join(os.RemoveAll(filepath.Dir(path)), os.WriteFile(filepath.Dir(path), nil, 0o600))
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lib", "libnvidia-ml.so.1")
			must(t, os.Mkdir(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path+".1", []byte("old"), 0o600))
			must(t, os.Symlink(path+".1", path))
			f := fileAt(path)
			must(t, tc.change(path))
			if got := f.changed(); tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
	if f := fileAt(filepath.Join(t.TempDir(), "nothing")); f != nil {
		t.Errorf("a file that is not there: %v", f)
	}
}

// A library that could not be loaded, because it was being installed, may become another file: this process can still load that.
func TestALibraryThatIsBeingInstalledIsNotReplaced(t *testing.T) {
	for _, loaded := range []bool{false, true} {
		h := newHost(t)
		k := New(Options{Clock: clock.RealClock{}, Dir: h.dir})
		for range 2 {
			leave, err := k.Enter(h.ctx, h.library)
			must(t, err)
			leave()
		}
		if !loaded {
			k.NotLoaded()
		}
		h.install("whole")
		leave, err := k.Enter(h.ctx, h.library)
		if opened := err == nil; opened == loaded {
			t.Errorf("loaded before: %t; opened: %t, %v", loaded, opened, err)
		}
		if leave == nil {
			continue
		}
		leave()
		h.install("another one")
		if _, err := k.Enter(h.ctx, h.library); err == nil {
			t.Error("it is loaded now, and was replaced")
		}
	}
}

// Of who asks and who opens one sees the other: never is the driver open when the one who asked is told that it is not.
func TestWhoAsksNeverHasTheDriverBesideAnAgent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "driver")
	var open atomic.Int32
	var group sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	for range 2 {
		group.Go(func() {
			for ctx.Err() == nil {
				k := New(Options{Clock: clock.RealClock{}, Dir: dir})
				if leave, err := k.Enter(ctx, ""); err == nil {
					open.Add(1)
					time.Sleep(time.Millisecond)
					open.Add(-1)
					leave()
				}
			}
		})
	}
	for range 50 {
		must(t, Ask(t.Context(), dir, ""))
		for range 3 {
			if n := open.Load(); n > 0 {
				t.Errorf("%d agents have the driver open", n)
			}
			time.Sleep(time.Millisecond)
		}
		must(t, change(dir, func() error { return durable.Remove(durable.OS{}, requestPath(dir)) }))
		time.Sleep(2 * time.Millisecond)
	}
	stop()
	group.Wait()
}

// An agent that closes the driver, or cannot, does not have it as one does that has opened it again.
func TestTheCommandDoesNotEndWithAnAgentThatClosesTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		a, _ := h.start()
		done, err := a.Begin("the preparation of claim a/one")
		must(t, err)
		a.mu.Lock()
		a.holds = errors.New("an act on gpu-0")
		a.mu.Unlock()
		short, cancel := context.WithTimeout(h.ctx, 10*time.Second)
		defer cancel()
		if err := Ask(short, h.dir, "x"); !errors.Is(err, ErrStillOpen) {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- End(h.ctx, h.dir) }()
		time.Sleep(soon)
		done()
		time.Sleep(soon)
		a.expect("it closes the driver", true, false, "an act on gpu-0")
		a.mu.Lock()
		a.holds = nil
		a.mu.Unlock()
		time.Sleep(soon)
		a.expect("closed", false, true, Released)
		select {
		case err := <-ended:
			t.Fatalf("no agent has opened the driver again, and the command says: %v", err)
		default:
		}
		next, _ := h.start()
		time.Sleep(soon)
		select {
		case err := <-ended:
			must(t, err)
		default:
			t.Error("the command does not see that the agent is back")
		}
		next.kill()
	})
}

// The command waits until an agent is back, and says who else asks.
func TestTheCommandEndsWithAnAgentThatHasTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		must(t, Ask(h.ctx, h.dir, "x"))
		h.annotate("firmware")
		a, _ := h.start()
		if err := End(h.ctx, h.dir); !errors.Is(err, ErrStillReleased) || !strings.Contains(err.Error(), "firmware") {
			t.Errorf("the annotation asks, too, and the command says %v", err)
		}
		h.annotate("false")
		time.Sleep(soon)
		if !a.anew() {
			t.Fatal("the agent does not begin anew")
		}
		ended := make(chan error, 1)
		go func() { ended <- End(h.ctx, h.dir) }()
		time.Sleep(time.Minute)
		select {
		case err := <-ended:
			t.Errorf("without an agent the command ends: %v", err)
		default:
		}
		next, opened := h.start()
		time.Sleep(soon)
		select {
		case err := <-ended:
			if !opened || err != nil {
				t.Errorf("opened %t, and the command says %v", opened, err)
			}
		default:
			t.Error("the command does not see that the agent is back")
		}
		next.kill()
	})
}
