// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"stowage.dev/stowage/pkg/agent/durable"
)

// TestALookThatIsUnderWayIsNotTakenForAFolderThatHangs when a claim fails because of the folder meanwhile: another look is due after it.
func TestALookThatIsUnderWayIsNotTakenForAFolderThatHangs(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	begun, end := make(chan struct{}), make(chan struct{})
	gone := func(name string) *socket { return &socket{path: filepath.Join(t.TempDir(), name), closed: true} }
	c := &selfCheck{
		status: newStatus(), fsys: durable.OS{}, soon: make(chan struct{}, 1), registrar: gone("r"), endpoint: gone("e"),
		tell:  func(context.Context, *problem) {},
		needs: needs{folders: func() error { return nil }, empty: func() error { return nil }, programs: func(context.Context) error { return nil }},
		readLedger: func() error {
			begun <- struct{}{}
			<-end
			return nil
		},
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.run(ctx)
	}()
	<-begun
	c.prepared(&fs.PathError{Op: "write", Path: "record", Err: unix.ENOSPC})
	for range 2 { // when the second one fits it has been looked since the first was taken
		c.soon <- struct{}{}
	}
	if _, why := c.status.get(stageFolders); why != (problem{}) {
		t.Errorf("while the look is under way: %+v", why)
	}
	end <- struct{}{}
	<-begun // the look that was asked for
	cancel()
	end <- struct{}{}
	<-done
}

// TestAnAgentThatStopsTellsNothing of itself any more, however long the kubelet's calls take: the agent that follows is ready. Before, what
// lasts is told.
func TestAnAgentThatStopsTellsNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		happens func(*Status)
		told    string
	}{
		"it stops":            {happens: (*Status).stop},
		"a folder fails":      {happens: func(s *Status) { s.fail(stageFolders, reasonFolderFull, "full") }, told: reasonFolderFull},
		"it fails, and stops": {happens: func(s *Status) { s.fail(stageFolders, reasonFolderFull, "full"); s.stop() }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStatus()
			for _, st := range []stage{stageLedger, stageFolders, stageServing, stageRegistered} {
				s.set(st, true)
			}
			told := ""
			c := &selfCheck{status: s, tell: func(_ context.Context, p *problem) { told += p.reason }}
			now := time.Now()
			c.tellWhatLasts(t.Context(), now)
			tc.happens(s)
			for range 60 {
				now = now.Add(time.Second)
				c.tellWhatLasts(t.Context(), now)
			}
			if told != tc.told {
				t.Errorf("told %q, want %q", told, tc.told)
			}
		})
	}
}

// TestWhatIsWrongAtTheStartIsToldAtOnce, unless it is that the kubelet has not come by yet: then it has the time that it always has.
func TestWhatIsWrongAtTheStartIsToldAtOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		happens func(*Status)
		told    string
		later   string
	}{
		"nothing is":             {happens: func(*Status) {}},
		"a folder fails":         {func(s *Status) { s.fail(stageFolders, reasonFolderFull, "full") }, reasonFolderFull, reasonFolderFull},
		"the agent replaces one": {func(s *Status) { s.setReplaces() }, "", reasonNotRegistered},
		"a folder fails, too":    {func(s *Status) { s.setReplaces(); s.fail(stageFolders, reasonFolderFull, "full") }, reasonFolderFull, reasonFolderFull},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStatus()
			for _, st := range []stage{stageLedger, stageFolders, stageServing} {
				s.set(st, true)
			}
			told := ""
			c := &selfCheck{status: s, tell: func(_ context.Context, p *problem) { told += p.reason }}
			tc.happens(s)
			if c.begin(t.Context()); told != tc.told {
				t.Errorf("at the start: told %q, want %q", told, tc.told)
			}
			c.tellWhatLasts(t.Context(), time.Now().Add(lasting))
			if told != tc.later {
				t.Errorf("later: told %q, want %q", told, tc.later)
			}
		})
	}
}

// TestAKubeletThatIsQuickIsRegistered: it may call as soon as the registration socket is there again, and what it says is the last word.
func TestAKubeletThatIsQuickIsRegistered(t *testing.T) {
	root, err := os.MkdirTemp("", "quick") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	path := filepath.Join(root, "reg.sock")
	registrar, err := listenOn(path)
	if err != nil {
		t.Fatal(err)
	}
	defer registrar.Close()
	c := &selfCheck{status: newStatus(), registrar: registrar, endpoint: &socket{closed: true}}
	for range 100 {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		c.status.set(stageRegistered, true)
		called := make(chan struct{})
		go func() {
			defer close(called)
			for {
				if conn, err := net.Dial("unix", path); err == nil {
					if reached, _ := c.status.get(stageRegistered); reached {
						t.Error("the driver is registered by a socket that was lost")
					}
					c.status.set(stageRegistered, true)
					_ = conn.Close()
					return
				}
			}
		}()
		if !c.keepSockets(t.Context()) {
			t.Fatal("the socket was not made anew")
		}
		<-called
		if reached, why := c.status.get(stageRegistered); !reached {
			t.Fatalf("the kubelet has registered the driver, and the agent says %q", why.message)
		}
	}
}

// TestASocketIsLostBeforeItIsMadeAnew, and not while it is there.
func TestASocketIsLostBeforeItIsMadeAnew(t *testing.T) {
	root, err := os.MkdirTemp("", "lost") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	path := filepath.Join(root, "s")
	s, err := listenOn(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	said := ""
	keep := func() error {
		_, err := s.keep(func() {
			_, err := os.Lstat(path)
			said += fmt.Sprintf("lost, gone %v;", errors.Is(err, fs.ErrNotExist))
		})
		return err
	}
	if err := errors.Join(keep(), os.Remove(path), keep(), keep()); err != nil {
		t.Fatal(err)
	}
	if want := "lost, gone true;"; said != want {
		t.Errorf("%q, want %q", said, want)
	}
}

// echo answers each call, as another plugin does.
type echo struct {
	registerapi.UnimplementedRegistrationServer
	drapb.UnimplementedDRAPluginServer
}

func (echo) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Name: Name}, nil
}

func (echo) NodePrepareResources(context.Context, *drapb.NodePrepareResourcesRequest) (*drapb.NodePrepareResourcesResponse, error) {
	return &drapb.NodePrepareResourcesResponse{}, nil
}

// TestAnAgentThatDoesNotAnswerIsNotReady, although its sockets are there and are its own: only a call finds that out, and only a call that is
// answered ends it.
func TestAnAgentThatDoesNotAnswerIsNotReady(t *testing.T) {
	t.Parallel()
	serve := func(t *testing.T, s *socket, options ...grpc.ServerOption) (stop func()) {
		t.Helper()
		server := grpc.NewServer(options...)
		registerapi.RegisterRegistrationServer(server, echo{})
		drapb.RegisterDRAPluginServer(server, echo{})
		done := make(chan error, 1)
		go func() { done <- server.Serve(s) }()
		stop = sync.OnceFunc(func() { server.Stop(); <-done })
		t.Cleanup(stop)
		return stop
	}
	for name, tc := range map[string]struct {
		// breaks is the one of the two sockets that does not answer.
		registrar bool
		happens   func(t *testing.T, s *socket)
		says      string
		// later is that it fails in another way from now on, and thenSays how.
		later    func(t *testing.T, s *socket)
		thenSays string
	}{
		"the plugin's socket: nobody takes what comes":       {happens: func(*testing.T, *socket) {}, says: "DeadlineExceeded", later: closeEach, thenSays: "Unavailable"},
		"the registration socket: nobody takes what comes":   {registrar: true, happens: func(*testing.T, *socket) {}, says: "DeadlineExceeded"},
		"the plugin's socket: somebody else answers":         {happens: func(t *testing.T, s *socket) { serve(t, s) }, says: "somebody else answers"},
		"the registration socket: each connection is closed": {registrar: true, happens: closeEach, says: "Unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
			ctx := klog.NewContext(t.Context(), logger)
			root, err := os.MkdirTemp("", "silent") // short enough for a socket
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(root) })
			c := &selfCheck{status: newStatus(), instance: "me"}
			for _, s := range []**socket{&c.endpoint, &c.registrar} {
				if *s, err = listenOn(filepath.Join(root, fmt.Sprint(s == &c.registrar))); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { (*s).Close() })
			}
			bad, good := c.endpoint, c.registrar
			if tc.registrar {
				bad, good = good, bad
			}
			serve(t, good, grpc.UnaryInterceptor(c.answer))
			tc.happens(t, bad)
			for range 2 {
				c.callSelf(ctx)
				if !c.keepSockets(ctx) {
					t.Fatal("a socket is gone")
				}
				reached, why := c.status.get(stageServing)
				if want := "the agent does not answer on its own socket " + bad.path + ": "; reached || why.reason != "SocketDoesNotAnswer" || !strings.HasPrefix(why.message, want) || !strings.Contains(why.message, tc.says) {
					t.Errorf("serving is %t, %+v, want %s… %s", reached, why, want, tc.says)
				}
			}
			if log := logger.GetSink().(ktesting.Underlier).GetBuffer().String(); strings.Count(log, "Claims cannot be prepared on this node") != 1 {
				t.Errorf("the log has not one line:\n%s", log)
			}
			if tc.later != nil {
				tc.later(t, bad)
				c.callSelf(ctx)
				if _, why := c.status.get(stageServing); !strings.Contains(why.message, tc.thenSays) {
					t.Errorf("then it says %q, want %q in it", why.message, tc.thenSays)
				}
			}
			// It answers again.
			if err := os.Remove(bad.path); err != nil {
				t.Fatal(err)
			}
			again, err := listenOn(bad.path)
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			serve(t, again, grpc.UnaryInterceptor(c.answer))
			if tc.registrar {
				c.registrar = again
			} else {
				c.endpoint = again
			}
			c.callSelf(ctx)
			if reached, why := c.status.get(stageServing); !reached || why != (problem{}) {
				t.Errorf("when it answers serving is %t, %+v", reached, why)
			}
		})
	}
}

// closeEach takes each connection and closes it.
func closeEach(t *testing.T, s *socket) {
	done := make(chan struct{})
	t.Cleanup(func() { s.Close(); <-done })
	go func() {
		defer close(done)
		for {
			conn, err := s.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
}
