package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
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
		return fmt.Sprintf("NVIDIA's DRA driver has left %s, by which it remembers the claims that it has prepared on this node: if it is to be replaced, drain the node and remove the file", e.Checkpoint)
	case e.Err != nil:
		return fmt.Sprintf("something serves the registration socket %s for driver %s but does not say what it is: %v; stop it first, the kubelet would hand claims to either", e.Registrar, Name, e.Err)
	case e.SameUID:
		return fmt.Sprintf("another stowage node agent (%s) already serves driver %s on this node with the same --pod-uid, by the registration socket %s: stop it first, or give each agent a --pod-uid of its own", e.Version, Name, e.Registrar)
	case e.Version != "":
		return fmt.Sprintf("another stowage node agent (%s) already serves driver %s on this node, with the registration socket %s: stop it first, or give both agents their --pod-uid for a rolling update", e.Version, Name, e.Registrar)
	default:
		return fmt.Sprintf("another plugin already serves driver %s on this node, with the registration socket %s and the endpoint %s: remove it first, the kubelet would hand claims to either", Name, e.Registrar, e.Endpoint)
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
	entries, err := os.ReadDir(a.registryDir())
	if err != nil {
		return fmt.Errorf("look for other plugins: %w", err)
	}
	logger := klog.FromContext(ctx)
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket == 0 {
			continue
		}
		path := filepath.Join(a.registryDir(), entry.Name())
		ours := strings.HasPrefix(entry.Name(), Name+"-") && strings.HasSuffix(entry.Name(), "-reg.sock")
		if stale(path) {
			if ours {
				logger.Info("Removing the registration socket of a plugin that is gone", "socket", path)
				if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("remove stale socket: %w", err)
				}
			}
			continue
		}
		info, version, err := askRegistrar(ctx, path)
		switch {
		case err != nil && ours:
			return &RivalError{Registrar: path, Err: err}
		case err != nil:
			logger.Info("A plugin of another name does not answer, going on without it", "socket", path, "reason", err.Error())
		case info.GetName() != Name || info.GetType() != registerapi.DRAPlugin:
		case version != "" && a.opts.PodUID != "" && path == a.registrarPath():
			// It would take the other one's sockets, and leave the kubelet with none when it ends.
			return &RivalError{Registrar: path, Endpoint: info.GetEndpoint(), Version: version, SameUID: true}
		case version != "" && a.opts.PodUID != "" && filepath.Dir(info.GetEndpoint()) == a.pluginDir() && filepath.Base(info.GetEndpoint()) != "dra.sock":
			logger.Info("Starting beside another agent, which this one replaces", "socket", path, "version", version)
			a.status.setReplaces()
		default:
			return &RivalError{Registrar: path, Endpoint: info.GetEndpoint(), Version: version}
		}
	}
	checkpoint := filepath.Join(a.pluginDir(), nvidiaCheckpoint)
	if _, err := os.Stat(checkpoint); err == nil {
		return &RivalError{Checkpoint: checkpoint}
	}
	return a.removeStaleEndpoints(ctx)
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

// stale reports whether nobody listens on the socket: the process that made it is gone.
func stale(path string) bool {
	conn, err := net.DialTimeout("unix", path, rivalTimeout)
	if err != nil {
		return errors.Is(err, syscall.ECONNREFUSED)
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
