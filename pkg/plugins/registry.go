package plugins

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"

	// Registers the arguments' types.
	_ "stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// NewRegistry returns the plugins for one scheduler. All its profiles share one account of who holds which
// device. A second scheduler in the same process needs a registry of its own.
func NewRegistry() frameworkruntime.Registry {
	shared := deviceclaims.NewShared()
	return frameworkruntime.Registry{
		deviceclaims.Name: func(ctx context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
			return deviceclaims.New(ctx, args, handle, shared)
		},
	}
}
