// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// socketPrefix begins the names of all sockets made here.
	socketPrefix = "stowage-"
	// maxSocketPath is what fits into a socket address on Linux, without the terminating zero.
	maxSocketPath = 107

	// registerTimeout is longer than the kubelet waits for our socket (10 s).
	registerTimeout = 15 * time.Second
	// lookInterval bounds how long it takes to find out what no event tells.
	lookInterval = 5 * time.Second
	// DefaultStreamGrace is how long the kubelet may not listen to an endpoint that is registered.
	DefaultStreamGrace = 5 * time.Second
)

// Options of a Server. All but the last two are required.
type Options struct {
	// Dir is the kubelet's folder for device plugins, with its socket kubelet.sock: /var/lib/kubelet/device-plugins. The kubelet
	// deletes all sockets in it when it starts.
	Dir       string
	Inventory Inventory
	Holder    Holder
	// Strategies to tell the container runtime of devices; at least one.
	Strategies []Strategy
	Clock      clock.WithTicker
	// StreamGrace is DefaultStreamGrace if 0.
	StreamGrace time.Duration
}

func (o *Options) kubeletSocket() string { return filepath.Join(o.Dir, "kubelet.sock") }

// Server keeps the resources of an inventory registered with the kubelet.
type Server struct {
	opts Options
	// process tells the sockets of this server from those of any other.
	process string

	mu     sync.Mutex
	events []events
}

// New returns a server; nothing is served before Run.
func New(opts Options) *Server {
	if opts.StreamGrace == 0 {
		opts.StreamGrace = DefaultStreamGrace
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Server{opts: opts, process: uuid.NewString()[:8]}
}

// Run serves until ctx ends. A kubelet that is not there, or does not take a registration, is waited for.
func (s *Server) Run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "device-plugin"))
	s.sweep(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { s.watch(ctx) })
	running := map[string]bool{}
	for {
		resources, changed := s.opts.Inventory.Resources()
		for _, resource := range resources {
			if !running[resource.Name] {
				running[resource.Name] = true
				events := s.toldOfEvents()
				group.Go(func() { s.keep(ctx, resource.Name, events) })
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// keep serves one resource at a new socket each time that the kubelet has to be told of it anew.
func (s *Server) keep(ctx context.Context, resource string, events events) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "resource", resource)
	backoff := firstPause
	said := ""
	var current *endpoint
	defer func() {
		if current != nil {
			current.stop()
		}
	}()
	for n := 1; ctx.Err() == nil; n++ {
		kubelet, err := os.Stat(s.opts.kubeletSocket())
		var next *endpoint
		if err == nil {
			if next, err = serve(ctx, &s.opts, resource, s.socketOf(resource, n)); err == nil {
				if err = next.register(ctx); err != nil {
					next.stop()
				}
			}
		}
		if err != nil {
			if reason := err.Error(); reason != said && ctx.Err() == nil {
				said = reason
				logger.Info("Resource cannot be registered with the kubelet now, trying on", "reason", reason)
			}
			s.pause(ctx, backoff.Step(), events.kubelet)
			continue
		}
		// Only now: what the kubelet asks the one before is answered, and its end is not taken for the resource's.
		if current != nil {
			current.stop()
		}
		current, backoff, said = next, firstPause, ""
		logger.Info("Resource is registered with the kubelet", "socket", next.socket)
		if reason := s.lost(ctx, next, kubelet, events.any); ctx.Err() == nil {
			logger.Info("Resource is to be registered anew", "reason", reason)
		}
	}
}

// firstPause grows up to half a minute. A kubelet that starts ends each.
var firstPause = wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Steps: 6, Cap: 30 * time.Second}

// socketOf is short: the kubelet's folder may be deep, and a path has 107 bytes.
func (s *Server) socketOf(resource string, n int) string {
	_, name, _ := strings.Cut(resource, "/")
	return filepath.Join(s.opts.Dir, fmt.Sprintf("%s%s-%s-%d.sock", socketPrefix, name, s.process, n))
}

func (s *Server) pause(ctx context.Context, d time.Duration, look <-chan struct{}) {
	timer := s.opts.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C():
	case <-look:
	}
}

// lost returns, with the reason if ctx has not ended, when the kubelet may not know the endpoint any more: it has started anew, our
// socket is gone, or it has stopped to listen.
func (s *Server) lost(ctx context.Context, e *endpoint, kubelet os.FileInfo, look <-chan struct{}) string {
	for ctx.Err() == nil {
		now, err := os.Stat(s.opts.kubeletSocket())
		switch {
		case !e.hasSocket():
			return "the plugin's socket is gone"
		// An inode's number is soon another file's.
		case err == nil && (!os.SameFile(kubelet, now) || !kubelet.ModTime().Equal(now.ModTime())):
			return "the kubelet has started anew"
		case !e.listened():
			return "the kubelet does not listen"
		}
		s.pause(ctx, min(lookInterval, s.opts.StreamGrace), look)
	}
	return ""
}

// events in the kubelet's folder, as one plugin is told of them. Who has failed to register does not wait for those of its own
// sockets, which it has just made and removed.
type events struct{ any, kubelet chan struct{} }

func (s *Server) toldOfEvents() events {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := events{any: make(chan struct{}, 1), kubelet: make(chan struct{}, 1)}
	s.events = append(s.events, e)
	return e
}

// watch tells of events in the folder until ctx ends. Without, it is looked at every lookInterval.
func (s *Server) watch(ctx context.Context) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		utilruntime.HandleErrorWithContext(ctx, err, "The kubelet's folder cannot be watched, it is only looked at periodically", "folder",
			s.opts.Dir, "interval", lookInterval)
		return
	}
	defer watcher.Close()
	ticker := s.opts.Clock.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		// Again, as the folder may be another one by now; one that is watched already stays so.
		if err := watcher.Add(s.opts.Dir); err != nil {
			klog.FromContext(ctx).V(2).Info("The kubelet's folder cannot be watched now", "folder", s.opts.Dir, "reason", err.Error())
		}
		select {
		case <-ctx.Done():
			return
		case event := <-watcher.Events:
			s.tell(event.Name == s.opts.kubeletSocket() || event.Name == s.opts.Dir)
		case err := <-watcher.Errors:
			utilruntime.HandleErrorWithContext(ctx, err, "Watch of the kubelet's folder", "folder", s.opts.Dir)
			s.tell(true)
		case <-ticker.C():
			s.tell(false)
		}
	}
}

func (s *Server) tell(kubelet bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		signal(e.any)
		if kubelet {
			signal(e.kubelet)
		}
	}
}

// signal does not block: one who has not looked yet will see what is new as well.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sweep removes what agents that are gone have left.
func (s *Server) sweep(ctx context.Context) {
	left, _ := filepath.Glob(filepath.Join(s.opts.Dir, socketPrefix+"*.sock")) // the pattern is valid
	for _, path := range left {
		conn, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			_ = conn.Close() // another agent's, which still serves
			continue
		}
		if err := os.Remove(path); err == nil {
			klog.FromContext(ctx).Info("Socket that nobody serves is removed", "socket", path)
		}
	}
}

// dial connects to a socket, with the first call.
func dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	return conn, nil
}
