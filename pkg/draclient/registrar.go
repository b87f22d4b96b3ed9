// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrarTimeout bounds the whole conversation with a registrar.
const registrarTimeout = 10 * time.Second

// Ask asks the registrar at a socket who its plugin is (GetInfo), and registers nothing. kind is the plugin's type, such as
// registration.DRAPlugin.
func Ask(ctx context.Context, socket string) (plugin Plugin, kind string, err error) {
	ctx, cancel := context.WithTimeout(ctx, registrarTimeout)
	defer cancel()
	err = talk(socket, func(registrar registration.RegistrationClient) error {
		plugin, kind, err = getInfo(ctx, registrar, socket)
		return err
	})
	return plugin, kind, err
}

// RegisterFrom does the kubelet's part of plugin registration over a registrar's socket: it asks for the plugin (GetInfo), registers it if
// it is a DRA plugin, and tells the plugin how that went (NotifyRegistrationStatus). It returns the plugin as registered.
func (r *Registry) RegisterFrom(ctx context.Context, socket string) (Plugin, error) {
	ctx, cancel := context.WithTimeout(ctx, registrarTimeout)
	defer cancel()
	var plugin Plugin
	err := talk(socket, func(registrar registration.RegistrationClient) error {
		found, kind, err := getInfo(ctx, registrar, socket)
		if err != nil {
			return err
		}
		failure := r.registerInfo(kind, found)
		status := &registration.RegistrationStatus{PluginRegistered: failure == nil}
		if failure != nil {
			status.Error = failure.Error()
		}
		if _, err := registrar.NotifyRegistrationStatus(ctx, status); err != nil && failure == nil {
			// The plugin does not want to be registered, or is gone.
			failure = fmt.Errorf("NotifyRegistrationStatus of registrar %s: %w", socket, err)
			if err := r.Deregister(found.Driver, found.Endpoint); err != nil {
				return fmt.Errorf("%w; and deregistering: %w", failure, err)
			}
		}
		if failure == nil {
			plugin = found
		}
		return failure
	})
	return plugin, err
}

// talk connects to a registrar for as long as f takes.
func talk(socket string, f func(registration.RegistrationClient) error) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to registrar %s: %w", socket, err)
	}
	defer conn.Close()
	return f(registration.NewRegistrationClient(conn))
}

func getInfo(ctx context.Context, registrar registration.RegistrationClient, socket string) (Plugin, string, error) {
	info, err := registrar.GetInfo(ctx, &registration.InfoRequest{})
	if err != nil {
		return Plugin{}, "", fmt.Errorf("GetInfo of registrar %s: %w", socket, err)
	}
	plugin := Plugin{Driver: info.Name, Endpoint: info.Endpoint, Services: info.SupportedVersions}
	if plugin.Endpoint == "" {
		plugin.Endpoint = socket
	}
	return plugin, info.Type, nil
}

func (r *Registry) registerInfo(kind string, plugin Plugin) error {
	if kind != registration.DRAPlugin {
		return fmt.Errorf("plugin %s at %s is of type %q: only %q is served here", plugin.Driver, plugin.Endpoint, kind, registration.DRAPlugin)
	}
	return r.Register(plugin)
}
