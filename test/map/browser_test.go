// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package maptest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

const (
	// binary is what "make build" makes.
	binary = "../../bin/kubectl-stowage"
	// artefacts keeps the screenshots.
	artefacts = "../../.run/map"
	// patience is how long anything may take that has no limit of its own.
	patience = 60 * time.Second
)

// chromium finds the browser. Where there is none, root installs Debian's.
var chromium = sync.OnceValues(func() (string, error) {
	names := []string{"chromium", "chromium-browser", "google-chrome"}
	find := func() string {
		for _, name := range names {
			if path, err := exec.LookPath(name); err == nil {
				return path
			}
		}
		return ""
	}
	if path := find(); path != "" {
		return path, nil
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Getuid() != 0 {
		return "", fmt.Errorf("none of %s is installed, and Debian's package chromium can be installed by root alone", strings.Join(names, ", "))
	}
	for _, args := range [][]string{{"update"}, {"install", "-y", "--no-install-recommends", "chromium", "fonts-liberation"}} {
		command := exec.Command(apt, args...)
		command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := command.CombinedOutput(); err != nil {
			return "", fmt.Errorf("apt-get %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	if path := find(); path != "" {
		return path, nil
	}
	return "", errors.New("the package chromium is installed, and has no program chromium")
})

// browser is one Chromium with its own profile.
type browser struct {
	t   *testing.T
	ctx context.Context
	// expectsErrors: what the browser refuses is what the test is about.
	expectsErrors atomic.Bool
}

func newBrowser(t *testing.T, more ...chromedp.ExecAllocatorOption) *browser {
	t.Helper()
	path, err := chromium()
	if err != nil {
		t.Skipf("no browser: %v", err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-component-update", true), chromedp.WindowSize(1440, 900))
	if os.Getuid() == 0 {
		options = append(options, chromedp.NoSandbox)
	}
	options = append(options, more...)
	for attempt := 1; ; attempt++ {
		ctx, cancelAllocator := chromedp.NewExecAllocator(context.WithoutCancel(t.Context()), options...)
		ctx, cancel := chromedp.NewContext(ctx)
		err := chromedp.Do(ctx)
		if err == nil {
			t.Cleanup(cancelAllocator)
			t.Cleanup(cancel)
			return &browser{t: t, ctx: ctx}
		}
		cancel()
		cancelAllocator()
		if attempt == 3 { // it has crashed once in some hundred starts, before it had a page
			t.Fatal(err)
		}
		t.Logf("the browser is started again: %v", err)
	}
}

// tab is a page of the browser. What it logs as an error fails the test.
func (b *browser) tab(actions ...step) *browser {
	b.t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx)
	b.t.Cleanup(cancel)
	tab := &browser{t: b.t, ctx: ctx}
	tab.open()
	if err := chromedp.Listen(ctx, func(event any) {
		switch event := event.(type) {
		case *runtime.EventExceptionThrown:
			b.t.Errorf("the page throws: %s %+v", event.ExceptionDetails.Text, event.ExceptionDetails.Exception)
		case *log.EventEntryAdded:
			if event.Entry.Level == log.EntryLevelError && !tab.expectsErrors.Load() {
				b.t.Errorf("the browser tells: %s %s", event.Entry.Text, event.Entry.URL)
			}
		}
	}); err != nil {
		b.t.Fatal(err)
	}
	tab.run(call(log.Enable, cdp.Empty{}))
	tab.run(actions...)
	return tab
}

// step is something that a browser does.
type step = chromedp.Action[chromedp.Void]

// call makes a step of a command of the protocol.
func call[P, R any](command cdp.Command[P, R], params P) step {
	return func(ctx context.Context, _ *chromedp.Target) (chromedp.Void, error) {
		_, err := chromedp.Call(ctx, command, params)
		return chromedp.Void{}, err
	}
}

// open starts it. It lasts as long as the context that it is started with.
func (b *browser) open() {
	b.t.Helper()
	if err := chromedp.Do(b.ctx); err != nil {
		b.t.Fatal(err)
	}
}

func (b *browser) run(steps ...step) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

// eval evaluates JavaScript, of which it awaits a promise.
func eval[T any](b *browser, script string) T {
	b.t.Helper()
	value, err := tryEval[T](b, script)
	if err != nil {
		b.t.Fatalf("%s: %v", script, err)
	}
	return value
}

func tryEval[T any](b *browser, script string) (T, error) {
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	return chromedp.Run(ctx, chromedp.Evaluate[T](script, chromedp.EvalAwaitPromise))
}

// waitFor waits until an expression is true, looked at in each frame. The page's policy forbids what chromedp.Poll does.
func (b *browser) waitFor(expression string) {
	b.t.Helper()
	if _, err := tryEval[bool](b, fmt.Sprintf(`new Promise((done) => {
		const look = () => ((%s) ? done(true) : requestAnimationFrame(look));
		look();
	})`, expression)); err != nil {
		text, _ := tryEval[string](b, `document.body.innerText.slice(0, 2000)`)
		b.t.Fatalf("waiting for %s: %v; the page has:\n%s", expression, err, text)
	}
}

// size makes the window that large.
func size(width, height int64) step { return chromedp.EmulateViewport(width, height) }

// scheme is "light" or "dark", as the system would say.
func scheme(name string) step {
	return call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}},
	})
}

// picture keeps a screenshot.
func (b *browser) picture(name string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err := errors.Join(err, os.MkdirAll(artefacts, 0o755), os.WriteFile(filepath.Join(artefacts, name+".png"), png, 0o600)); err != nil {
		b.t.Fatal(err)
	}
}

// server is "kubectl stowage map".
type server struct {
	// page is its address with the token, origin that without.
	page, origin, token string
	process             *os.Process
}

var addressLine = regexp.MustCompile(`(http://127\.0\.0\.1:\d+)/#token=(\S+)`)

// serve starts the command, and ends it with the test: by an interrupt, after which it has to say 0.
func serve(t *testing.T, args ...string) *server {
	t.Helper()
	command := exec.Command(binary, append([]string{"map", "--open=false"}, args...)...)
	command.Env = append(os.Environ(), "HOME="+t.TempDir())
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	command.Stderr = os.Stderr
	if err := command.Start(); err != nil {
		t.Fatalf("%v; 'make build' makes it", err)
	}
	timer := time.AfterFunc(patience, func() { _ = command.Process.Kill() })
	s := &server{process: command.Process}
	scanner := bufio.NewScanner(out)
	for s.page == "" && scanner.Scan() {
		if match := addressLine.FindStringSubmatch(scanner.Text()); match != nil {
			s.page, s.origin, s.token = strings.TrimSpace(scanner.Text()), match[1], match[2]
		}
	}
	timer.Stop()
	t.Cleanup(func() {
		if err := command.Process.Signal(syscall.SIGINT); err != nil {
			t.Error(err)
		}
		timer := time.AfterFunc(patience, func() { _ = command.Process.Kill() })
		defer timer.Stop()
		if err := command.Wait(); err != nil {
			t.Errorf("after an interrupt: %v", err)
		}
	})
	if s.page == "" {
		t.Fatal("it has printed no address")
	}
	return s
}
