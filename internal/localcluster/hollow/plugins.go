// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/draclient"
)

// rescanInterval is how often the registrars are looked at when nothing has changed in their folder: to try those again that did not
// answer.
const rescanInterval = time.Second

func registryFolder(root string) string { return filepath.Join(root, "plugins_registry") }

// pluginWatcher keeps the registry equal to the sockets in a folder, as the kubelet's plugin manager does: a socket that appears is asked
// and registered, one that disappears is deregistered, and one that was made anew is both.
type pluginWatcher struct {
	folder     string
	registry   *draclient.Registry
	registered func() // called after a registration
	events     *fsnotify.Watcher

	// Only run uses it. Key: path of the registrar's socket.
	known map[string]knownPlugin
}

type knownPlugin struct {
	socket socketID
	plugin draclient.Plugin
}

// socketID tells a socket from another that was made at the same path later.
type socketID struct {
	inode    uint64
	modified time.Time
}

func newPluginWatcher(folder string, registry *draclient.Registry, registered func()) (*pluginWatcher, error) {
	events, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watching the plugin registrars: %w", err)
	}
	if err := events.Add(folder); err != nil {
		events.Close()
		return nil, fmt.Errorf("watching the plugin registrars in %s: %w", folder, err)
	}
	return &pluginWatcher{
		folder: folder, registry: registry, registered: registered, events: events,
		known: map[string]knownPlugin{},
	}, nil
}

// run serves the folder until ctx ends.
func (w *pluginWatcher) run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	defer w.events.Close()
	ticker := time.NewTicker(rescanInterval)
	defer ticker.Stop()
	for {
		if err := w.scan(ctx); err != nil {
			logger.Error(err, "Looking for plugin registrars")
		}
		select {
		case <-ctx.Done():
			return
		case <-w.events.Events:
		case err := <-w.events.Errors:
			logger.Error(err, "Watching the plugin registrars")
		case <-ticker.C:
		}
	}
}

// scan compares the sockets with what is registered. A registrar that fails is tried again by the next scan.
func (w *pluginWatcher) scan(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	sockets, err := w.sockets()
	if err != nil {
		return err
	}
	for path, known := range w.known {
		if sockets[path] == known.socket {
			continue
		}
		delete(w.known, path)
		logger.V(2).Info("Plugin has gone", "driver", known.plugin.Driver, "registrar", path)
		if err := w.registry.Deregister(known.plugin.Driver, known.plugin.Endpoint); err != nil {
			logger.Error(err, "Closing the connection to a plugin that has gone", "driver", known.plugin.Driver)
		}
	}
	for path, socket := range sockets {
		if _, ok := w.known[path]; ok {
			continue
		}
		plugin, err := w.registry.RegisterFrom(ctx, path)
		if err != nil {
			logger.V(4).Info("Registering a plugin failed, will try again", "registrar", path, "err", err)
			continue
		}
		w.known[path] = knownPlugin{socket: socket, plugin: plugin}
		logger.V(2).Info("Plugin is registered", "driver", plugin.Driver, "endpoint", plugin.Endpoint, "services", plugin.Services)
		w.registered()
	}
	return nil
}

// sockets lists the registrars. As for the kubelet, a name with a leading dot is not for us.
func (w *pluginWatcher) sockets() (map[string]socketID, error) {
	entries, err := os.ReadDir(w.folder)
	if err != nil {
		return nil, err
	}
	sockets := map[string]socketID{}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") || entry.Type()&fs.ModeSocket == 0 {
			continue
		}
		info, err := entry.Info()
		if err != nil {
			continue // gone meanwhile
		}
		id := socketID{modified: info.ModTime()}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			id.inode = stat.Ino
		}
		sockets[filepath.Join(w.folder, entry.Name())] = id
	}
	return sockets, nil
}
