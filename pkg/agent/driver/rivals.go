// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	infoMethod   = "/pluginregistration.Registration/GetInfo"
	notifyMethod = "/pluginregistration.Registration/NotifyRegistrationStatus"

	// identityHeader marks the answers of this very program's registrar. NVIDIA's driver has the same
	// driver name and socket folder, so neither tells the two apart.
	identityHeader = "stowage-node-agent"

	// nvidiaCheckpoint is the file in the driver's folder in which NVIDIA's driver keeps prepared claims. Its
	// GPUs may be in use, and only it knows which.
	nvidiaCheckpoint = "checkpoint.json"

	rivalTimeout = 2 * time.Second
	// rivalInterval is how often an agent that serves looks for rivals.
	rivalInterval = 10 * time.Second
)

// RivalError says that another plugin serves the same driver name on this node.
type RivalError struct {
	// Registrar is the registration socket, Endpoint the socket that the kubelet would call.
	Registrar, Endpoint string
	// Version is set if the rival is another instance of this program, and SameUID if it has the sockets that this one would make.
	Version string
	SameUID bool
	// Checkpoint is set if the rival does not run but has left a record of prepared claims.
	Checkpoint string
	// Err is set if the rival accepts connections but does not answer.
	Err error
}

func (e *RivalError) Error() string {
	switch {
	case e.Checkpoint != "":
		return fmt.Sprintf("NVIDIA's DRA driver has left %s, by which it remembers the claims that it has prepared on this node: if it is to "+
			"be replaced, drain the node and remove the file", e.Checkpoint)
	case e.Err != nil:
		return fmt.Sprintf("something serves the registration socket %s for driver %s but does not say what it is: %.200s; stop it, the "+
			"kubelet would hand claims to either", e.Registrar, Name, e.Err)
	case e.SameUID:
		return fmt.Sprintf("another stowage node agent (%.100s) already serves driver %s on this node with the same --pod-uid, by the "+
			"registration socket %s: stop it first, or give each agent a --pod-uid of its own", e.Version, Name, e.Registrar)
	case e.Version != "":
		return fmt.Sprintf("another stowage node agent (%.100s) already serves driver %s on this node, with the registration socket %s: stop "+
			"it first, or give both agents their --pod-uid for a rolling update", e.Version, Name, e.Registrar)
	default:
		return fmt.Sprintf("another plugin serves driver %s on this node, with the registration socket %s and the endpoint %.200q: the kubelet "+
			"calls whoever registered last, and both publish the node's devices in turns. "+
			"Cordon and drain the node, and remove one of the two", Name, e.Registrar, e.Endpoint)
	}
}

func (e *RivalError) Unwrap() error { return e.Err }

// identify lets a second agent on the node recognise this one.
func identify(version string) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if info.FullMethod == infoMethod {
			_ = grpc.SetHeader(ctx, metadata.Pairs(identityHeader, version))
		}
		return handler(ctx, request)
	}
}

// checkRivals asks every registration socket of the node who it is. It returns a *RivalError if one of them
// serves our driver name and is not the agent that this one is about to replace, and removes the sockets that
// a crashed agent has left: the kubelet would try them again and again.
func (a *Agent) checkRivals(ctx context.Context) error {
	sockets, err := a.registrationSockets()
	if err != nil {
		return fmt.Errorf("look for other plugins: %w", err)
	}
	logger := klog.FromContext(ctx)
	for _, path := range slices.Sorted(maps.Keys(sockets)) {
		if stale(path) {
			if mayServeUs(path) {
				logger.Info("Removing the registration socket of a plugin that is gone", "socket", path)
				if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("remove stale socket: %w", err)
				}
			}
			continue
		}
		switch who, err := a.judge(ctx, path); who {
		case aRival:
			return err
		case anAgentOfOurs:
			logger.Info("Starting beside another agent, which this one replaces", "socket", path)
			a.status.setReplaces()
		case nobodyKnown:
			logger.Info("A plugin of another name does not answer, or one has just ended, going on without it",
				"socket", path, "reason", err.Error())
		case somebodyElse:
		}
	}
	if err := a.nvidiaLeftovers(); err != nil {
		return err
	}
	return a.removeStaleEndpoints(ctx)
}

// registrationSockets are those that the kubelet looks at: in all folders below its own, also hidden ones, which it walks when it starts.
// Only sockets whose own names begin with a dot it passes over.
func (a *Agent) registrationSockets() (map[string]fs.FileInfo, error) {
	root, sockets := a.registryDir()+"/", map[string]fs.FileInfo{} // the folder itself may be a link
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil && path == root:
			return err
		case err != nil, path == root, strings.HasPrefix(entry.Name(), "."):
			return nil
		}
		if file, err := os.Stat(path); err == nil && file.Mode()&os.ModeSocket != 0 { // of a link, too
			sockets[path] = file
		}
		return nil
	})
	return sockets, err
}

// registrant is who has a registration socket.
type registrant int

const (
	// somebodyElse serves another driver name.
	somebodyElse registrant = iota
	// nobodyKnown does not answer, and is gone by now or its socket has another driver's name.
	nobodyKnown
	// anAgentOfOurs is another agent of a rolling update.
	anAgentOfOurs
	// aRival serves our driver name.
	aRival
)

// judge asks who has the registration socket. The error is a *RivalError for a rival, and says why nobody is known.
func (a *Agent) judge(ctx context.Context, path string) (registrant, error) {
	info, version, err := askRegistrar(ctx, path)
	switch {
	case err != nil && mayServeUs(path) && !stale(path): // an agent that ends while it is asked is none
		return aRival, &RivalError{Registrar: path, Err: err}
	case err != nil:
		return nobodyKnown, err
	case info.GetName() != Name || info.GetType() != registerapi.DRAPlugin:
		return somebodyElse, nil
	case version != "" && a.opts.PodUID != "" && path == a.registrarPath():
		// It would take the other one's sockets, and leave the kubelet with none when it ends.
		return aRival, &RivalError{Registrar: path, Endpoint: info.GetEndpoint(), Version: version, SameUID: true}
	case version != "" && a.opts.PodUID != "" && filepath.Dir(info.GetEndpoint()) == a.pluginDir() &&
		filepath.Base(info.GetEndpoint()) != "dra.sock":
		return anAgentOfOurs, nil
	}
	return aRival, &RivalError{Registrar: path, Endpoint: info.GetEndpoint(), Version: version}
}

// mayServeUs tells by the name of a registration socket whether it is one of our driver name.
func mayServeUs(path string) bool {
	name := filepath.Base(path)
	return strings.HasPrefix(name, Name+"-") && strings.HasSuffix(name, "-reg.sock")
}

// nvidiaLeftovers returns a *RivalError if NVIDIA's driver may have prepared claims on the node.
func (a *Agent) nvidiaLeftovers() error {
	checkpoint := filepath.Join(a.pluginDir(), nvidiaCheckpoint)
	if _, err := os.Stat(checkpoint); err != nil {
		return nil
	}
	return &RivalError{Checkpoint: checkpoint}
}

// rivalWatch is what an agent that serves knows of the node's registration sockets.
type rivalWatch struct {
	agent *Agent
	// others are the sockets of other drivers. They are asked once: some plugins log each question.
	others map[string]fs.FileInfo
	// rivals are the sockets that were a rival's at the last look.
	rivals sets.Set[string]
}

// watchRivals looks until ctx ends for plugins of our driver name that come later. The kubelet hands claims to the last one that came.
func (a *Agent) watchRivals(ctx context.Context) {
	w := &rivalWatch{agent: a}
	wait.UntilWithContext(klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "rivals")), w.look, rivalInterval)
}

// look asks the sockets that are new, and those of our driver name, who they are. The agent is not ready for as long as there is a rival.
// Who does not answer is one only if it was: the kubelet does not register it either, and it may be an agent of ours that starts, or cannot
// end. Sockets of plugins that are gone may stay: the kubelet prefers a plugin that it can reach.
func (w *rivalWatch) look(ctx context.Context) {
	a := w.agent
	sockets, err := a.registrationSockets()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Could not look for other plugins", "reason", err.Error()) // the self-check tells that the folder is gone
		return
	}
	rival := a.nvidiaLeftovers()
	others, rivals := map[string]fs.FileInfo{}, sets.New[string]()
	for _, path := range slices.Sorted(maps.Keys(sockets)) { // of several rivals the same one is named each time
		if path == a.check.registrar.path {
			continue
		}
		file := sockets[path]
		if known := w.others[path]; known != nil && os.SameFile(known, file) && known.ModTime().Equal(file.ModTime()) {
			others[path] = file
			continue
		}
		if stale(path) {
			continue
		}
		switch who, err := a.judge(ctx, path); who {
		case somebodyElse:
			others[path] = file
		case aRival:
			if errors.Unwrap(err) == nil || w.rivals.Has(path) {
				rivals.Insert(path)
				rival = err
			}
		case anAgentOfOurs, nobodyKnown:
		}
	}
	if ctx.Err() != nil {
		return
	}
	w.others, w.rivals = others, rivals
	if rival != nil {
		a.check.fail(ctx, stageAlone, reasonRivalPlugin, rival)
	} else {
		a.status.set(stageAlone, true)
	}
}

// registrarPath is the agent's own registration socket if it has a pod UID.
func (a *Agent) registrarPath() string {
	return filepath.Join(a.registryDir(), kubeletplugin.RollingUpdateRegistrarSocketFile(a.registryDir(), Name, a.opts.PodUID))
}

// removeStaleEndpoints clears the driver's own folder of sockets that nobody serves any more.
func (a *Agent) removeStaleEndpoints(ctx context.Context) error {
	paths, err := filepath.Glob(filepath.Join(a.pluginDir(), "dra*.sock"))
	if err != nil {
		return fmt.Errorf("look for stale sockets: %w", err)
	}
	for _, path := range paths {
		if !stale(path) {
			continue
		}
		klog.FromContext(ctx).Info("Removing the socket of an agent that is gone", "socket", path)
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove stale socket: %w", err)
		}
	}
	return nil
}

// stale reports whether nobody listens on the socket: the process that made it is gone, or has taken it away.
func stale(path string) bool {
	conn, err := net.DialTimeout("unix", path, rivalTimeout)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
	}
	_ = conn.Close()
	return false
}

// askRegistrar asks a plugin for its name and, if it is this program, its version.
func askRegistrar(ctx context.Context, path string) (info *registerapi.PluginInfo, version string, err error) {
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, rivalTimeout)
	defer cancel()
	var header metadata.MD
	info, err = registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.Header(&header))
	if values := header.Get(identityHeader); len(values) > 0 {
		version = values[0]
	}
	return info, version, err
}
